"""The rank that waits for a late one shows it as exposed communication."""

import time
from typing import Any

import pytest

from tests.group.harness import run_ranks
from tests.group.test_training import Watch, wrapped


def _straggler(kind: str) -> Any:
    """Rank 1 is 50 ms late in every step; return the usual exposed and total seconds."""
    import statistics

    import torch
    import torch.distributed as dist

    watch = Watch("full")
    model = wrapped(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(6):
        if dist.get_rank() == 1:
            time.sleep(0.05)
        model(torch.ones(4, 4)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    rows = watch.rows()[1:]
    return [statistics.median(row[key] for row in rows) for key in ("comm_s", "comm_total_s")]


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "tp"])
def test_the_rank_that_waits_for_a_straggler_shows_it_as_exposed(kind: str) -> None:
    waiting, late = run_ranks(2, _straggler, kind)
    assert waiting[0] >= 0.04
    assert waiting[1] >= 0.04
    assert late[0] <= waiting[0] / 2
