"""Faults on purpose, struck into a real cluster while a cell runs."""

import pytest

from nbdist import RankError, Session
from nbdist.client.session.chaos import ChaosPlan
from tests.cluster.conftest import Kernel

# Lasts longer than any fault here needs to come, and alike on both ranks.
CELL = """
import time
for _ in range(STEPS):
    _sum = torch.ones(1)
    dist.all_reduce(_sum)
    time.sleep(0.001)
"""


@pytest.mark.parametrize(
    ("kind", "error"),
    [("raise", "PlannedFault"), ("interrupt", "KeyboardInterrupt"), ("kill", "Died")],
)
def test_one_rank_fails_and_the_session_goes_on(session: Session, kind: str, error: str) -> None:
    chaos = session.start_chaos(ChaosPlan((kind,), (1,), every_s=0.5, faults=1))

    with pytest.raises(RankError) as raised:
        session.run(CELL.replace("STEPS", "10_000"), timeout_s=60)

    assert raised.value.failures[1][0] == error
    report = chaos.report()
    assert report.faults == {kind: 1}
    assert (report.failed, report.lost_sessions) == (1, 0)
    assert not chaos.is_armed
    total = session.run("_sum = torch.ones(1); dist.all_reduce(_sum); _sum.item()")
    assert total.value_list == [2.0, 2.0]


@pytest.mark.parametrize("kind", ["stop", "slow"])
def test_a_rank_that_is_held_delays_the_cell_and_fails_nothing(session: Session, kind: str) -> None:
    chaos = session.start_chaos(ChaosPlan((kind,), (0,), every_s=0.2, faults=1))

    session.run(CELL.replace("STEPS", "500"))

    session.stop_chaos()
    report = chaos.report()
    assert report.faults == {kind: 1}
    assert (report.cells, report.failed) == (1, 0)


def test_chaos_strikes_no_more_once_it_is_off(session: Session) -> None:
    chaos = session.start_chaos(ChaosPlan(("raise",), (0, 1), every_s=0.1))

    session.stop_chaos()

    session.run("import time; time.sleep(0.3)")
    assert chaos.report().faults == {}


def test_a_line_begins_it_and_a_line_tells_what_came_of_it(notebook: Kernel) -> None:
    armed = notebook.run("%dist chaos raise -r 1 --every 0.3s --faults 1 --seed 7")
    failed = notebook.cell(CELL.replace("STEPS", "10_000"))
    told = notebook.run("%dist chaos")

    assert "raise on rank 1, every 0.3 s, seed 7; active" in armed.text
    assert failed.error is not None
    assert "PlannedFault" in failed.error[1]
    assert "seed 7; over" in told.text
    assert "Faults:    1 (1 raise)" in told.text
    assert "Sessions:  none lost" in told.text
    assert "Recovery:  median" in told.text


def test_an_interrupt_in_the_midst_of_no_grad_leaves_gradients_on(session: Session) -> None:
    """As Python raises it between the switch in `no_grad().__enter__` and the `with`."""
    with pytest.raises(RankError):
        session.run("torch.no_grad().__enter__(); raise KeyboardInterrupt")

    kept = session.run("torch.is_grad_enabled()")
    assert kept.value_list == [True, True]


def test_gradients_that_a_cell_has_switched_off_stay_off(session: Session) -> None:
    session.run("torch.set_grad_enabled(False)")
    with pytest.raises(RankError):
        session.run("1 / 0")

    kept = session.run("torch.set_grad_enabled(True).prev")
    assert kept.value_list == [False, False]
