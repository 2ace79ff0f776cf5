"""What ranks told of a cell, and what that means for those that still run it."""

from nbdist.client.cells.listener import CellFailure as Told
from nbdist.client.cells.listener import Collector
from nbdist.client.cells.outcome import gone
from nbdist.client.faults.rank_state import Gone
from nbdist.client.output.live_text import LiveText
from nbdist.client.output.slots import Slots
from tests.unit.fakes import FakeCluster


def test_a_rank_whose_peer_went_away_was_freed_and_has_not_failed() -> None:
    closed = "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"
    collectors = {
        rank: Collector(rank, LiveText(Slots(False), [rank]), print, print) for rank in (0, 1)
    }
    collectors[0].failure = Told("RuntimeError", closed, (), 1.0)
    collectors[1].failure = Told("ValueError", "no", (), 1.0)
    found = gone(FakeCluster(n=2).ranks, collectors)
    assert found == {0: Gone("freed", "a collective"), 1: Gone("failed", "ValueError")}
    assert found[0].predicate(1) == "was released while waiting in a collective"
