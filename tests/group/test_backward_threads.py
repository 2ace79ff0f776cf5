"""A backward on one of autograd's threads, as on a GPU, is seen as the main thread's."""

from functools import cache
from typing import Any

import pytest

from tests.group.backward_ranks import STEPS, train_on_both
from tests.group.harness import run_ranks

EVERY_TIME = ("ddp", "zero3", "pp=2")
SLOW = ("zero1", "zero2", "tp=2", "fsdp=2 tp=2")


@cache
def trained(*layouts: str) -> list[dict[str, Any]]:
    """Return of each rank, by layout, what it tells of the main thread and of another."""
    return run_ranks(4 if "fsdp=2 tp=2" in layouts else 2, train_on_both, list(layouts))


@pytest.mark.parametrize(
    "layout", [*EVERY_TIME, *(pytest.param(text, marks=pytest.mark.slow) for text in SLOW)]
)
def test_steps_losses_collectives_and_lines_are_those_of_the_main_thread(layout: str) -> None:
    for of_rank in trained(*EVERY_TIME if layout in EVERY_TIME else (layout,)):
        there, here = of_rank[layout]
        assert here["losses"] == there["losses"]
        assert here["weights"] == there["weights"]
        assert here["calls"] == there["calls"]
        assert {line for _, line in here["calls"]} <= {"cell 7, line 4", "cell 7, line 5"}
        assert len(here["steps"]) == len(there["steps"]) == STEPS
        for a, b in zip(here["steps"], there["steps"], strict=True):
            assert a.keys() ^ b.keys() <= {"rss_bytes"}  # told twice a second
            counted = ("collectives", "bytes", "loss")
            assert [a.get(name) for name in counted] == [b.get(name) for name in counted]
