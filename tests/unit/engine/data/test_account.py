"""Which loaders of a cell, and of which session, have one account."""

from pathlib import Path

import pytest

from nbdist.engine.data.position import journal
from nbdist.engine.data.position.account import Accounts


def test_loaders_of_a_cell_that_are_made_of_the_same_are_told_apart_in_order() -> None:
    accounts = Accounts()
    assert [accounts.count_alike(1, "numbers", 8) for _ in range(3)] == [0, 1, 2]
    assert accounts.count_alike(2, "numbers", 8) == 0
    assert accounts.count_alike(1, "numbers", 9) == 0


def test_a_session_is_known_by_its_cluster_once_a_rank_has_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "_here", journal.SampleJournal())
    monkeypatch.delenv("MASTER_PORT", raising=False)
    accounts = Accounts()
    assert accounts.session() == ""
    accounts.keep_in(tmp_path, "4711", 0, 1, is_first=True)
    assert accounts.session() == f"{tmp_path.name}-4711"
    assert (tmp_path / "journal-4711-0").exists()
