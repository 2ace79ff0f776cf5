"""What two recordings of runs tell: equal, round-off, or the first place at which they part."""

import copy
import json
import math
from typing import Any

import pytest

from nbdist.client.metrics.numerics.distances import first_beyond
from nbdist.client.metrics.numerics.runs import Recording, RunDiff, compare, read
from nbdist.shared.errors import UsageError

Entries = list[list[Any]]


def sums(scale: float, seed: int = 1) -> list[float]:
    """Return a sketch of a tensor of this norm; the last number is its fingerprint."""
    return [scale * math.sin(seed * (place + 1)) / math.sqrt(8) for place in range(16)] + [
        scale * seed
    ]


def step(**changed: Any) -> Entries:
    told: dict[str, Any] = {"weight": 2.0, "output": 3.0, "gradient": 1.0, "tiny": 1e-9} | changed
    return [
        ["weight", "0.weight", "float32 (2, 8)", sums(told["weight"])],
        ["random", "cpu", "", changed.get("random", "aa")],
        ["input", "the model", "float32 (4, 8)", sums(1.0)],
        ["output", "0", changed.get("shape", "float32 (4, 2)"), sums(told["output"])],
        ["loss", "", "", changed.get("loss", 0.5)],
        ["gradient", "0.weight", "float32 (2, 8)", sums(told["gradient"])],
        ["gradient", "0.bias", "float32 (2,)", sums(told["tiny"])],
        ["options", "group 0", "", {"lr": changed.get("lr", "0.1")}],
    ]


def recording(
    name: str, *steps: Entries, layout: str = "ddp", torch: str = "2.13.0", ranks: int = 2
) -> Recording:
    numbered = dict(enumerate(steps or (step(), step()), 1))
    return Recording(name, layout, torch, {rank: copy.deepcopy(numbered) for rank in range(ranks)})


def first_of(found: RunDiff) -> tuple[int, str, str]:
    at = first_beyond(found.distances)
    assert at is not None
    first = found.distances[at]
    return first.step, first.what, first.name


def test_equal_runs_are_equal_bit_for_bit() -> None:
    found = compare(recording("a"), recording("b"))
    assert found.ok
    assert found.sentences == ["equal bit for bit in all of the 2 steps."]


def test_round_off_is_told_with_its_first_place_and_is_no_difference() -> None:
    found = compare(recording("a"), recording("b", step(output=3.0 + 1e-6), step()))
    assert found.ok
    assert found.sentences == [
        "equal within round-off; the first that differs is the output of 0 at step 1."
    ]


def test_another_torch_is_named_beside_what_it_changes() -> None:
    other = recording("b", step(output=3.1), step(), torch="2.11.0")
    found = compare(recording("a"), other)
    assert first_of(found) == (1, "output", "0")
    assert "torch was 2.13.0 and 2.11.0." in found.sentences


def test_a_gradient_of_round_off_alone_may_be_any_other() -> None:
    """As that of a bias before batch norm, which is zero but for round-off."""
    assert compare(recording("a"), recording("b", step(tiny=-2e-9), step(tiny=3e-9))).ok


def test_a_sample_of_round_off_before_does_not_hide_where_runs_part() -> None:
    found = compare(recording("a"), recording("b", step(output=3.0 + 1e-6), step(gradient=1.1)))
    assert first_of(found) == (2, "gradient", "0.weight")
    assert (
        "All before it is within round-off, and bit for bit before the output of 0 of step 1."
        in found.sentences
    )


def test_options_are_named_with_both_values() -> None:
    found = compare(recording("a"), recording("b", step(), step(lr="0.2")))
    assert "at the options of group 0: lr 0.1 and 0.2." in found.sentences[0]


def test_what_is_not_a_number_on_one_side_is_beyond_round_off() -> None:
    found = compare(recording("a"), recording("b", step(output=math.nan), step()))
    assert first_of(found) == (1, "output", "0")


def test_the_same_that_is_not_a_number_is_equal() -> None:
    """A fingerprint of NaNs is one of bits."""
    bad = step()
    bad[3][3] = [math.nan] * 16 + [7.0]
    assert compare(recording("a", bad), recording("b", bad)).ok


def test_another_shape_is_told_with_both() -> None:
    found = compare(recording("a"), recording("b", step(shape="float32 (4, 3)"), step()))
    assert first_of(found) == (1, "output", "0")
    assert "the output of 0: float32 (4, 2) and float32 (4, 3)." in found.sentences[0]
    assert found.sentences[-1] == "Another model, another optimizer, or another loop."


def test_what_one_run_alone_has_is_told_with_its_name() -> None:
    found = compare(recording("a"), recording("b", step()[:3] + step()[4:], step()))
    assert "the output of 0: a alone has it." in found.sentences[0]


def test_a_cause_is_named_only_where_what_comes_before_was_compared() -> None:
    bare = [entry for entry in step() if entry[0] not in ("input", "output")]
    changed = [entry for entry in step(loss=0.6) if entry[0] not in ("input", "output")]
    found = compare(recording("a", bare), recording("b", changed))
    assert found.sentences[-1] == (
        "The inputs and outputs of this step are not recorded: the cause may lie there."
    )


def test_the_run_that_goes_on_longer_is_named() -> None:
    found = compare(recording("a", step(), step(), step()), recording("b"))
    assert found.sentences == [
        "equal bit for bit in all of the 2 steps.",
        "a goes on until step 3.",
    ]


def test_steps_that_are_not_recorded_are_told() -> None:
    steps = dict(enumerate((step(), step()), 1))
    one = Recording("a", "ddp", "2.13.0", {0: {1: steps[1], 9: steps[2]}})
    other = Recording("b", "ddp", "2.13.0", {0: {1: steps[1], 9: step(weight=2.5)}})
    assert "at step 9 (7 steps before it not recorded), on rank 0" in str(compare(one, other))


def test_runs_that_cannot_be_compared_are_refused() -> None:
    with pytest.raises(UsageError, match="a has written 2 ranks down, and b 3"):
        compare(recording("a"), recording("b", ranks=3))
    later = Recording("b", "ddp", "2.13.0", {0: {7: step()}, 1: {7: step()}})
    with pytest.raises(UsageError, match="a has the layout ddp, and b tp=2") as refused:
        compare(recording("a"), recording("b", layout="tp=2"))
    assert '%dist diff "ddp" "tp=2" compares layouts' in refused.value.do
    with pytest.raises(UsageError, match="no step in common"):
        compare(recording("a"), later)


def test_a_line_that_a_killed_rank_has_not_ended_is_left_out() -> None:
    lines = [
        json.dumps({"format": 1, "torch": "2.13.0"}),
        json.dumps({"step": 1, "entries": step()}),
        json.dumps({"step": 2, "entries": step()})[:40],
    ]
    assert list(read("a", "ddp", {0: lines}).ranks[0]) == [1]
    with pytest.raises(UsageError, match="format 9"):
        read("a", "ddp", {0: [json.dumps({"format": 9})]})
