"""`%dist probe` between live ranks."""

import pytest

from nbdist import Session, UsageError
from tests.cluster.conftest import Kernel
from tests.cluster.test_faults import assert_usable


def test_a_probe_measures_each_link_and_changes_nothing(session: Session) -> None:
    session.run("kept = [rank]")
    (link,) = session.probe()
    assert link.ranks == (0, 1)
    assert 0 < link.latency_s < 1
    assert link.bandwidth > 1e6
    assert session.run("kept").value_list == [[0], [1]]
    assert_usable(session)


def test_the_magic_shows_a_table(notebook: Kernel) -> None:
    shown = notebook.run("%dist probe").text
    assert shown.split("\n")[0].split() == ["ranks", "hosts", "latency", "bandwidth"]
    assert "0 - 1  localhost" in shown


def test_links_of_one_rank_are_refused(session: Session) -> None:
    session.scale(1)
    try:
        with pytest.raises(UsageError, match="there is one rank"):
            session.probe()
    finally:
        session.scale(2)
