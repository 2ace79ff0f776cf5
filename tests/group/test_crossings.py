"""Stages with several tensors between them: one process's numbers, or refused in words."""

from functools import cache
from typing import Any

import pytest

from nbdist.engine.layout.policies.efficiency import ActivationCheckpoint
from tests.group.harness import run_ranks

RANKS = "tests.group.crossing_ranks:"
FLOOR = 1e-12  # float64
SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero-bubble", "zbv")
KINDS = (
    "Translator",
    "Frozen",
    "Untied",
    "UNet",
    "Borrowing",
    "Skipping",
    "AddingOutside",
    "CalledOddly",
)

EVERY_TIME: list[tuple[Any, ...]] = [
    ("Translator", "pp=2", "1f1b", ActivationCheckpoint()),
    ("UNet", "pp=2", "zbv"),
    ("CalledOddly", "pp=2", "gpipe"),
]
SLOW = [
    (2, [(kind, "pp=2", s) for kind in kinds for s in schedules])
    for kinds, schedules in ((KINDS, SCHEDULES[:3]), (KINDS[3:], SCHEDULES[3:]))
]
SLOW += [
    (4, [(kind, layout, "1f1b") for kind in KINDS for layout in ("pp=4", "pp=2 dp=2")]),
    (4, [("Untied", "pp=2 fsdp=2", s) for s in ("1f1b", "interleaved")]),
    (4, [("UNet", "pp=2 dp=2", "zbv"), ("UNet", "pp=2 fsdp=2", "1f1b")]),
]


@cache
def on_two_ranks() -> list[Any]:
    return run_ranks(2, RANKS + "on_two_ranks", EVERY_TIME, timeout_s=300)


def check(ranks: tuple[Any, ...]) -> None:
    for far, off, _, _ in ranks:
        assert far <= FLOOR
        assert off <= FLOOR
    assert set().union(*(its for _, _, its, _ in ranks)) == ranks[0][3]


@pytest.mark.parametrize("case", range(len(EVERY_TIME)))
def test_what_is_alive_at_a_cut_comes_to_the_next_stage_and_its_gradients_back(case: int) -> None:
    check(tuple(found[case] for found, *_ in on_two_ranks()))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("ranks", "cases"), SLOW)
def test_so_it_is_by_every_schedule_on_four_ranks_and_beside_other_axes(
    ranks: int, cases: list[Any]
) -> None:
    for found in zip(*run_ranks(ranks, RANKS + "try_all", cases, timeout_s=500), strict=True):
        check(found)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("Drawing", ["numbers drawn between the modules are used on both sides"]),
        ("Counting", ["a tensor of torch.int64 would be sent", "no gradient"]),
        ("Untied", ["decoder.block.0 makes of its weights alone", 'Pipeline("1f1b")']),
        ("InPlace", ["what token returns is changed in place"]),
        ("Sharing", ["in a way that is not seen", '"zero3" cuts any model']),
    ],
)
def test_what_cannot_be_sent_is_named(kind: str, words: list[str]) -> None:
    for _, refused, *_ in on_two_ranks():
        assert kind in ("Untied", "Sharing") or "No stage can begin with blocks." in refused[kind]
        assert [word for word in words if word not in refused[kind]] == []


def test_the_bytes_between_stages_are_those_explained() -> None:
    (_, _, (first, explained), _), (_, _, (last, _), _) = on_two_ranks()
    assert first + last == 2 * explained > 0


def test_a_state_is_the_plain_models_and_comes_back() -> None:
    assert [number for *_, far in on_two_ranks() for number in far if number] == []
