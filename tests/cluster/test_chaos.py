"""Faults on purpose, struck into a real cluster while a cell runs."""

import pytest

from nbdist import RankError, Session
from nbdist.client.chaos import Plan

# Lasts longer than any fault here needs to come, and alike on both ranks.
CELL = """
import time
for _ in range(STEPS):
    _sum = torch.ones(1)
    dist.all_reduce(_sum)
    time.sleep(0.001)
"""


@pytest.mark.parametrize(("kind", "error"), [("raise", "PlannedFault"), ("interrupt", "Keyboard")])
def test_one_rank_fails_and_the_session_goes_on(session: Session, kind: str, error: str) -> None:
    chaos = session.start_chaos(Plan((kind,), (1,), every_s=0.5, faults=1))

    with pytest.raises(RankError) as raised:
        session.run(CELL.replace("STEPS", "10_000"), timeout_s=60)

    assert raised.value.failures[1][0].startswith(error)
    report = chaos.report()
    assert report.faults == {kind: 1}
    assert (report.failed, report.lost_sessions) == (1, 0)
    assert not chaos.is_armed
    total = session.run("_sum = torch.ones(1); dist.all_reduce(_sum); _sum.item()")
    assert total.value_list == [2.0, 2.0]


@pytest.mark.parametrize("kind", ["stop", "slow"])
def test_a_rank_that_is_held_delays_the_cell_and_fails_nothing(session: Session, kind: str) -> None:
    chaos = session.start_chaos(Plan((kind,), (0,), every_s=0.2, faults=1))

    session.run(CELL.replace("STEPS", "500"))

    session.stop_chaos()
    report = chaos.report()
    assert report.faults == {kind: 1}
    assert (report.cells, report.failed) == (1, 0)


def test_chaos_strikes_no_more_once_it_is_off(session: Session) -> None:
    chaos = session.start_chaos(Plan(("raise",), (0, 1), every_s=0.1))

    session.stop_chaos()

    session.run("import time; time.sleep(0.3)")
    assert chaos.report().faults == {}
