"""What is said of loaders that starve the ranks."""

from dataclasses import replace
from typing import Any

import pytest

from nbdist.client.metrics.checks.rules.starving import (
    WAITS_FOR_LOADER,
    LoaderFacts,
    MeanStep,
    advice,
    sentence,
)
from nbdist.shared.wire import Record
from tests.unit.client.metrics.checks.watching import Watching

LOADER = LoaderFacts(prompt=3, line=5, workers=2, cores=8.0)
SLOW = MeanStep(0.11, 0.07, {"fetch": 0.2, "collate": 0.02}, making_cpu_s=0.2, cpu_s=0.04)


def test_the_number_of_workers_is_that_which_makes_a_batch_in_a_step() -> None:
    assert advice(SLOW, LOADER).startswith(
        "num_workers=6 instead of 2 (a batch takes 0.22 s to make, a step 0.04 s)"
    )


def test_where_the_cores_are_full_more_workers_are_not_advised() -> None:
    full = replace(SLOW, step_s=0.125)
    said = advice(full, replace(LOADER, cores=2.0))
    assert "more workers do not help" in said
    assert "0.24 s of processor time for a rank with 2 cores" in said
    assert "more workers do not help" in advice(replace(SLOW, starved_s=0.05), LOADER)


def test_what_waits_needs_no_cores() -> None:
    waits = replace(SLOW, making={"fetch": 0.2, "collate": 0.02}, making_cpu_s=0.02)
    said = advice(waits, replace(LOADER, cores=2.0))
    assert said.startswith("num_workers=6 instead of 2")
    assert advice(replace(waits, starved_s=0.05), LOADER).startswith("num_workers=6")


@pytest.mark.parametrize(
    ("part", "word"),
    [("transform", "make it cheaper"), ("decode", "columns="), ("read", "storage")],
)
def test_the_part_that_dominates_is_named(part: str, word: str) -> None:
    said = advice(replace(SLOW, making={part: 0.2, "collate": 0.02}), LOADER)
    assert word in said
    assert ("num_workers" in said) == (part == "transform")  # others are read ahead in the rank


def test_a_batch_that_takes_no_time_to_make_is_not_said_to_be_anything() -> None:
    quick = replace(SLOW, making=dict.fromkeys(("read", "decode", "collate"), 1e-5))
    said = sentence([0], 2, quick, LOADER)
    assert "making it" not in said
    assert "most of it" not in said


def test_copies_ask_for_pinned_memory_and_starts_of_workers_for_persistent_ones() -> None:
    copies = MeanStep(0.1, 0.06, {"fetch": 0.01, "copy": 0.05})
    assert advice(copies, LOADER).startswith("pin_memory=True")
    assert "pin_memory" not in advice(copies, replace(LOADER, pinned=True))
    late = replace(copies, making={"fetch": 0.2, "copy": 0.05})
    assert advice(late, LOADER).startswith("num_workers=5 instead of 2")
    seldom = replace(SLOW, is_seldom=True)
    assert advice(seldom, LOADER).startswith("persistent_workers=True")
    assert "persistent" not in advice(seldom, replace(LOADER, persistent=True))


def told(rank: int, step: int, data_s: float) -> Record:
    values = {"step_s": 0.04 + data_s, "data_s": data_s, "batches": 1.0, "loader": 7.0}
    values |= {"fetch_s": 0.2, "collate_s": 0.02, "making_cpu_s": 0.2, "cpu_s": 0.03}
    return Record(rank, step, "step", step, 0, values)


def heard(data_s: dict[int, float], steps: int) -> tuple[Watching, list[str]]:
    rule, said = Watching(WAITS_FOR_LOADER, data_s), []
    facts: dict[str, Any] = {"loader": 7.0, "prompt": 3.0, "line": 5.0, "workers": 2.0}
    facts |= {"pinned": 0.0, "persistent": 0.0, "cores": 8.0}
    for rank in data_s:
        rule.take(Record(rank, 0, "loader", 0, 0, facts))
    for step in range(1, steps + 1):
        said += [s for rank, wait_s in data_s.items() if (s := rule.take(told(rank, step, wait_s)))]
    return rule, said


def test_all_ranks_that_wait_are_one_sentence_with_line_split_and_number() -> None:
    _, (said,) = heard({0: 0.06, 1: 0.07}, 50)
    assert said.startswith(
        "All ranks wait for the loader of In[3], line 5: 64 % of a step is data (0.07 s of 0.11 s; "
        "making it: fetch 0.2 s, collate 0.02 s). Do: num_workers=6 instead of 2"
    )


def test_one_rank_that_waits_is_named_and_a_fed_one_is_not() -> None:
    _, (said,) = heard({0: 0.001, 1: 0.07}, 50)
    assert said.startswith("Rank 1 waits for the loader")
    assert heard({0: 0.001, 1: 0.002}, 50)[1] == []


def test_a_short_cell_is_told_at_its_end_and_a_very_short_one_is_not() -> None:
    rule, said = heard({0: 0.07}, 25)
    assert said == []
    assert rule.end().startswith("Rank 0 waits for the loader")
    assert heard({0: 0.07}, 15)[0].end() == ""
