"""The layout's text: what it asks for, and what is refused in which words."""

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nbdist.engine.layout.plan.axis_facts import AXES
from nbdist.engine.layout.plan.mesh import MeshShape, parse, ranks_needed
from nbdist.shared.errors import LayoutError


def refusal(text: str, world_size: int) -> str:
    with pytest.raises(LayoutError) as caught:
        parse(text, world_size)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "ranks", "shape"),
    [
        ("ddp", 4, MeshShape(dp=4)),
        ("dp=4", 4, MeshShape(dp=4)),
        ("dp=-1", 3, MeshShape(dp=3)),
        ("zero3", 2, MeshShape(fsdp=2)),
        ("fsdp", 2, MeshShape(fsdp=2)),
        ("fsdp=2", 2, MeshShape(fsdp=2)),
        ("zero2", 2, MeshShape(fsdp=2, reshard_after_forward=False)),
        ("fsdp=2 zero2", 2, MeshShape(fsdp=2, reshard_after_forward=False)),
        ("dp=2 fsdp=-1", 8, MeshShape(dp=2, fsdp=4)),
        ("dp=2 zero3", 8, MeshShape(dp=2, fsdp=4)),
        ("pp=2 fsdp=2 tp=2", 8, MeshShape(pp=2, fsdp=2, tp=2)),
        (" DP=2,  tp=-1 ", 4, MeshShape(dp=2, tp=2)),
        ("dp = 2 tp= 2", 4, MeshShape(dp=2, tp=2)),
        ("ddp", 1, MeshShape()),
        ("zero1", 4, MeshShape(dp=4, shards_states=True)),
        ("dp=2 zero1", 2, MeshShape(dp=2, shards_states=True)),
        ("zero1", 1, MeshShape(shards_states=True)),
        ("hsdp", 4, MeshShape(dp=2, fsdp=2)),
        ("hsdp", 6, MeshShape(dp=2, fsdp=3)),
        ("hsdp dp=4", 8, MeshShape(dp=4, fsdp=2)),
        ("hsdp fsdp=2", 8, MeshShape(dp=4, fsdp=2)),
        ("hsdp tp=2", 8, MeshShape(dp=2, fsdp=2, tp=2)),
        ("hsdp zero2", 4, MeshShape(dp=2, fsdp=2, reshard_after_forward=False)),
    ],
)
def test_a_layout_reads_as_its_mesh(text: str, ranks: int, shape: MeshShape) -> None:
    assert parse(text, ranks) == shape


@pytest.mark.parametrize(
    ("text", "ranks", "name"),
    [
        ("dp=4", 4, "ddp"),
        ("fsdp=4", 4, "zero3"),
        ("zero1", 4, "zero1"),
        ("zero2", 4, "zero2"),
        ("hsdp", 4, "dp=2 fsdp=2"),
        ("fsdp=2 dp=2", 4, "dp=2 fsdp=2"),
        ("dp=2 zero2", 4, "dp=2 fsdp=2 zero2"),
        ("tp=2 pp=2", 4, "pp=2 tp=2"),
    ],
)
def test_the_canonical_name_is_the_one_people_know(text: str, ranks: int, name: str) -> None:
    assert parse(text, ranks).name == name


@given(sizes=st.fixed_dictionaries({axis: st.integers(1, 3) for axis in AXES}), keep=st.booleans())
def test_a_canonical_name_reads_back_as_the_same_mesh(sizes: dict[str, Any], keep: bool) -> None:
    reshard = True if sizes["fsdp"] == 1 else keep
    shape = MeshShape(**sizes, reshard_after_forward=reshard)
    assert parse(shape.name, shape.world_size) == shape


def test_axes_are_ordered_outermost_first_whatever_the_text() -> None:
    assert list(parse("tp=2 fsdp=2 pp=2", 8).axes) == ["pp", "fsdp", "tp"]


def test_ranks_of_one_tp_group_work_on_the_same_part_of_a_batch() -> None:
    shape = MeshShape(dp=2, fsdp=2, tp=2)
    parts = [shape.data_part(rank) for rank in range(8)]
    assert parts == [(0, 4), (0, 4), (1, 4), (1, 4), (2, 4), (2, 4), (3, 4), (3, 4)]


def test_every_stage_of_a_pipeline_works_on_the_same_batches() -> None:
    assert [MeshShape(pp=2, dp=2).data_part(rank)[0] for rank in range(4)] == [0, 1, 0, 1]


def test_ranks_of_one_sequence_work_on_the_same_samples() -> None:
    assert [MeshShape(dp=2, cp=2).data_part(rank)[0] for rank in range(4)] == [0, 0, 1, 1]


def test_neighbours_over_cp_and_tp_draw_the_same_random_numbers() -> None:
    assert [
        MeshShape(pp=2, dp=2, cp=3, tp=2).same_samples,
        MeshShape(pp=2, fsdp=4).same_samples,
    ] == [6, 1]


@pytest.mark.parametrize(
    ("shape", "averaged", "replicas", "shards"),
    [
        (MeshShape(dp=2, tp=2), ["dp"], 2, 1),
        (MeshShape(dp=2, cp=3), ["dp", "cp"], 6, 1),
        (MeshShape(pp=2, cp=3), ["cp"], 3, 1),
        (MeshShape(dp=2, fsdp=4, cp=3), ["dp", "fsdp", "cp"], 2, 12),
    ],
)
def test_ranks_of_cp_count_among_shards_and_without_them_among_replicas(
    shape: MeshShape, averaged: list[str], replicas: int, shards: int
) -> None:
    assert (shape.averaged, shape.replicas, shape.shards) == (averaged, replicas, shards)


def test_ranks_of_ep_have_samples_of_their_own_and_are_neither_copies_nor_shards() -> None:
    shape = MeshShape(dp=2, ep=2)
    assert [shape.data_part(rank) for rank in range(4)] == [(0, 4), (1, 4), (2, 4), (3, 4)]
    assert (shape.averaged, shape.replicas, shape.shards, shape.same_samples) == (["dp"], 2, 1, 1)
    assert MeshShape(pp=2, fsdp=2, ep=2, tp=2).apart == ["fsdp", "ep"]


def test_ranks_beside_ep_are_offered_to_dp_first() -> None:
    assert 'let nbdist fill one in: "dp=-1 ep=2" gives dp=4' in refusal("ep=2", 8)


def test_a_single_rank_still_has_an_axis() -> None:
    assert parse("zero3", 1).axes == {"dp": 1}


def test_too_few_ranks_name_both_numbers_and_the_fix() -> None:
    assert refusal("dp=3 tp=2", 8) == (
        "dp=3 x tp=2 needs 6 ranks, and there are 8.\n"
        "Why: the product of all degrees must equal the world size\n"
        'Do:  let nbdist fill one in: "dp=-1 tp=2" gives dp=4'
    )


def test_a_layout_of_numbers_alone_needs_their_product_of_ranks() -> None:
    assert [ranks_needed(text) for text in ("fsdp=2 tp=2", "dp = 3", "zero3 tp=2")] == [4, 3, None]
    assert [ranks_needed(text) for text in ("ddp", "dp=2 fsdp=-1", "dp=0", "xp=2")] == [None] * 4
    assert ranks_needed(["dp=2"]) is None  # type: ignore[arg-type]


def test_a_fill_in_is_sought_on_every_axis() -> None:
    assert '"dp=2 fsdp=-1" gives fsdp=4' in refusal("dp=2 fsdp=3", 8)


def test_no_fill_in_is_promised_where_none_works() -> None:
    assert "divisors of 4" in refusal("dp=3 fsdp=3", 4)


def test_the_rest_must_be_a_whole_number() -> None:
    text = refusal("dp=3 fsdp=-1", 4)
    assert "dp=3 does not divide the 4 ranks" in text
    assert "1, 2, 4" in text


@pytest.mark.parametrize(
    ("text", "near"),
    [("zeor3", "zero3"), ("fdsp=2", "fsdp"), ("dpp", "ddp"), ("tpp=2", "tp"), ("zero3d", "zero3")],
)
def test_an_unknown_word_is_answered_with_the_nearest_right_one(text: str, near: str) -> None:
    word = text.partition("=")[0]
    assert f'Unknown word "{word}" in layout. Did you mean "{near}"?' in refusal(text, 2)


def test_a_word_like_no_other_is_answered_with_all_of_them() -> None:
    assert "axes are dp, fsdp, tp, cp, pp and ep" in refusal("quantum", 2)


@pytest.mark.parametrize("text", ["", "  ", ","])
def test_an_empty_layout_is_refused_with_an_example(text: str) -> None:
    assert 'such as "ddp"' in refusal(text, 2)


@pytest.mark.parametrize("text", ["dp=0", "dp=-2", "dp=two", "dp=1.5", "dp="])
def test_a_size_is_a_whole_number_or_minus_one(text: str) -> None:
    assert "a size is 1 or more, or -1" in refusal(text, 2)


def test_an_axis_without_a_size_is_refused_with_the_rest() -> None:
    assert '"dp=-1" takes the rest' in refusal("dp", 2)


def test_an_axis_given_twice_is_refused() -> None:
    assert "given twice" in refusal("dp=2 dp=2", 4)


def test_two_open_axes_are_refused() -> None:
    assert "both take the rest" in refusal("dp=-1 fsdp=-1", 4)
    assert "both take the rest" in refusal("ddp zero3", 4)


def test_a_name_takes_no_size_and_says_which_axis_does() -> None:
    assert '"fsdp=4 zero2"' in refusal("zero2=4", 4)


def test_zero2_and_zero3_at_once_are_refused() -> None:
    assert "at once" in refusal("zero2 zero3", 4)


@pytest.mark.parametrize(
    ("text", "ranks", "ranks_on_host", "shape"),
    [
        ("hsdp", 8, 4, MeshShape(dp=2, fsdp=4)),
        ("hsdp", 12, 2, MeshShape(dp=6, fsdp=2)),
        ("hsdp tp=2", 16, 8, MeshShape(dp=2, fsdp=4, tp=2)),
        ("hsdp pp=2", 32, 8, MeshShape(pp=2, dp=2, fsdp=8)),
        ("hsdp fsdp=2", 8, 4, MeshShape(dp=4, fsdp=2)),
    ],
)
def test_hsdp_shards_inside_a_host_and_replicates_between_hosts(
    text: str, ranks: int, ranks_on_host: int, shape: MeshShape
) -> None:
    assert parse(text, ranks, ranks_on_host) == shape


@pytest.mark.parametrize(
    ("text", "ranks", "ranks_on_host"),
    [
        *(("hsdp", ranks, ranks) for ranks in (1, 2, 3, 5)),
        ("hsdp", 8, 1),
        ("hsdp", 6, 4),
        ("hsdp tp=2", 8, 2),
        ("hsdp tp=3", 8, 4),
        ("hsdp pp=2", 8, 4),
        ("hsdp dp=1", 4, 4),
        ("hsdp fsdp=4", 4, 4),
    ],
)
def test_hsdp_without_replicas_of_shards_is_one_clear_error(
    text: str, ranks: int, ranks_on_host: int
) -> None:
    with pytest.raises(LayoutError, match=f'"{text}" finds no replicas of shards on {ranks} ranks'):
        parse(text, ranks, ranks_on_host)


def test_hsdp_beside_an_open_axis_is_refused() -> None:
    assert "to two axes" in refusal("hsdp tp=-1", 8)


def test_hsdp_takes_no_size_and_says_which_axes_do() -> None:
    assert '"hsdp dp=2" has 2 replicas' in refusal("hsdp=2", 8)


@pytest.mark.parametrize(
    ("text", "instead"),
    [
        ("zero1 tp=2", '"fsdp=-1 tp=2 zero2"'),
        ("zero1 fsdp=2", '"fsdp=-1 zero2"'),
        ("zero1 ddp", 'write "zero1"'),
    ],
)
def test_zero1_goes_with_dp_alone(text: str, instead: str) -> None:
    assert "zero1 goes with dp alone" in refusal(text, 4)
    assert instead in refusal(text, 4)


WORDS = [
    *(f"{axis}={size}" for axis in AXES for size in (-1, 1, 2, 3, 4)),
    *("ddp", "zero1", "zero2", "zero3", "fsdp", "hsdp", "zero2=4", "zero3=2", "hsdp=2", "ddp=3"),
    *("dp", "tp", "zeor3", "fdsp=2", "ddpp", "tq=2", "quantum", "dp=0", "tp=x", ""),
]


@given(
    words=st.lists(st.sampled_from(WORDS), min_size=1, max_size=3),
    ranks=st.integers(1, 16),
    hosts=st.sampled_from([1, 2, 4]),
)
@settings(max_examples=500, deadline=None)
def test_every_layout_that_is_advised_can_be_had_with_these_ranks(
    words: list[str], ranks: int, hosts: int
) -> None:
    ranks_on_host = ranks // hosts if ranks % hosts == 0 else ranks
    try:
        parse(" ".join(words), ranks, ranks_on_host)
    except LayoutError as error:
        for advised in re.findall(r'"([^"]*)"', error.do):
            assert parse(advised, ranks, ranks_on_host).world_size == ranks


@pytest.mark.parametrize(
    ("text", "ranks", "advice"),
    [
        ("tp=2", 4, 'let nbdist fill one in: "dp=-1 tp=2" gives dp=2'),
        ("tp=3", 4, 'let nbdist fill one in: "tp=-1" gives tp=4'),
        ("fsdp=3 zero2", 4, 'let nbdist fill one in: "fsdp=-1 zero2" gives fsdp=4'),
        ("hsdp", 2, '"zero3" shards over all ranks'),
        ("hsdp tp=2", 4, '"tp=2 zero3" shards over all ranks'),
        ("hsdp", 9, 'give a number: "hsdp fsdp=3"'),
        ("zero2=4", 8, 'the axis is fsdp: "dp=-1 fsdp=4 zero2"'),
        ("zero2=4", 6, 'the axis is fsdp, and "zero2" gives it all ranks'),
        ("fdsp=2 tp=2", 4, 'write "fsdp=2 tp=2"'),
        ("tp fsdp=2", 4, '"tp=-1 fsdp=2" takes the rest'),
    ],
)
def test_advice_keeps_what_was_asked_for_and_fits_the_ranks(
    text: str, ranks: int, advice: str
) -> None:
    assert refusal(text, ranks).endswith(f"Do:  {advice}")


@pytest.mark.parametrize(
    ("text", "ranks", "idle"),
    [
        ("zero3 pp=2", 2, ("zero3",)),
        ("zero3 pp=2", 4, ()),
        ("zero3", 1, ()),
        ("dp=-1 tp=2", 2, ()),
        ("zero1 dp=2", 2, ()),
    ],
)
def test_names_that_are_left_one_rank_are_remembered(
    text: str, ranks: int, idle: tuple[str, ...]
) -> None:
    assert parse(text, ranks).idle == idle


def test_zero1_and_zero2_at_once_are_refused() -> None:
    assert "both take the rest" in refusal("zero1 zero2", 4)
