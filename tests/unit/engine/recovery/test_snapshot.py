import math

import pytest
import torch

from nbdist.engine.component import EndedCell
from nbdist.engine.recovery import wrapped_models
from nbdist.engine.recovery.snapshots import snapshot_schedule as schedule
from nbdist.engine.recovery.snapshots.snapshot import Snapshots


def test_snapshots_are_thirty_seconds_apart_or_take_one_percent_of_the_time() -> None:
    assert schedule.next_at(1000.0, 0.1) == 1030.0
    assert schedule.next_at(1000.0, 2.0) == 1200.0


def test_a_snapshot_is_announced_so_early_that_ranks_which_look_once_a_second_hear_of_it() -> None:
    assert schedule.margin(0.01) * 0.01 > 2 * schedule.POLL_S
    assert schedule.margin(10.0) == 3


def test_one_slow_step_does_not_let_a_snapshot_be_announced_too_late() -> None:
    known = math.inf
    for step_s in (0.5, 0.01, 0.01, 2.0):
        known = schedule.shortest(known, step_s)
    assert known < 0.011


def test_a_snapshot_over_half_of_the_free_memory_is_refused_in_a_sentence() -> None:
    assert schedule.refusal(1_000_000_000, 4_000_000_000, ranks=2) is None
    why = schedule.refusal(1_000_000_001, 4_000_000_000, ranks=2)
    assert why is not None
    assert "would take 2.0 GB on this machine, more than half of the 4.0 GB that are free" in why


def test_without_memory_it_is_said_once_that_there_are_no_snapshots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parameters: list[torch.Tensor] = list(model.parameters())
    unit = wrapped_models.Unit("sharded", "m", (0, 1), parameters, [model], [optimizer], "m/1")
    monkeypatch.setattr(wrapped_models, "unit_of", lambda _: unit)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    snapshots = Snapshots(free_bytes=lambda: 0)

    for _ in range(2):
        snapshots.at_boundary(optimizer, 1)
    (why,) = snapshots.cell_ended(EndedCell(1, "", has_succeeded=True))

    assert why.startswith("No snapshot of the sharded state is kept")
    assert snapshots.cell_ended(EndedCell(2, "", has_succeeded=True)) == ()
    assert (snapshots.held(unit), snapshots.status()) == ([], {"refused": why})
