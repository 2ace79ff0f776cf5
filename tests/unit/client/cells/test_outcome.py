"""What ranks told of a cell, and what that means for those that still run it."""

from nbdist.client.cells.listener import CellFailure as Told
from nbdist.client.cells.listener import RankListener
from nbdist.client.cells.outcome import gone, is_news
from nbdist.client.faults.advice import A_CELL
from nbdist.client.faults.rank_state import Inactive
from nbdist.client.output.live_text import LiveText
from nbdist.client.output.slots import Slots
from nbdist.shared.processes.ended import Ended
from tests.unit.fakes import FakeCluster


def test_a_rank_whose_peer_went_away_was_freed_and_has_not_failed() -> None:
    closed = "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"
    collectors = dict(enumerate(_collectors()))
    collectors[0].failure = Told("RuntimeError", closed, (), 1.0)
    collectors[1].failure = Told("ValueError", "no", (), 1.0)
    found = gone(FakeCluster(n=2).ranks, collectors, A_CELL)
    assert found == {0: Inactive("freed", "a collective"), 1: Inactive("failed", "ValueError")}
    assert found[0].predicate(1) == "was released while waiting in a collective"


def test_a_reply_among_several_is_no_news_and_the_last_one_is() -> None:
    first, second = _collectors()
    assert not is_news([first, second])
    first.replied = True
    assert not is_news([first, second])
    second.replied = True
    assert is_news([first, second])


def test_a_failure_and_a_death_are_news_at_once() -> None:
    failure, death = Told("ValueError", "no", (), 1.0), Ended.from_status(-9)
    for change in ({"failure": failure}, {"death": death}):
        first, second = _collectors()
        for name, value in change.items():
            setattr(first, name, value)
        assert is_news([first, second])


def _collectors() -> list[RankListener]:
    return [RankListener(rank, LiveText(Slots(False), [rank]), print, print) for rank in (0, 1)]
