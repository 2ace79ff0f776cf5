"""A backward on one of autograd's threads, as on a GPU, is seen as the main thread's."""

from functools import cache
from typing import Any

import pytest

from tests.group.backward_ranks import STEPS, train_on_both
from tests.group.harness import run_ranks

LAYOUTS = ("ddp", "zero1", "zero2", "zero3", "tp=2", "pp=2", "fsdp=2 tp=2")


@cache
def trained(n: int) -> list[dict[str, Any]]:
    """Return of each rank, by layout, what it tells of the main thread and of another."""
    layouts = [layout for layout in LAYOUTS if (layout == "fsdp=2 tp=2") == (n == 4)]
    return run_ranks(n, train_on_both, layouts)


# The two axes of the last are each on their own among the others.
@pytest.mark.parametrize(
    "layout", [*LAYOUTS[:-1], pytest.param(LAYOUTS[-1], marks=pytest.mark.slow)]
)
def test_steps_losses_collectives_and_lines_are_those_of_the_main_thread(layout: str) -> None:
    for of_rank in trained(4 if layout == "fsdp=2 tp=2" else 2):
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
