"""A host's part of a session: its private folder."""

import json
from pathlib import Path
from typing import Any

import pytest

from nbdist.host.guest import Guest


@pytest.mark.parametrize("host", ["b", "c"])
def test_logs_of_a_host_lie_in_a_folder_of_the_cluster_s_name(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By that name and the token ranks of all hosts call the session that samples belong to."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    link: Any = None  # nothing is sent
    guest = Guest(link)
    logs = "/home/of/the/notebook/.nbdist/logs/20261128-101500-4242"
    hello = {"op": "hello", "host": host, "environment": {}, "logs": logs, "token": "t"}
    assert guest.answer(hello)["trouble"] == ""
    own, log = guest.prepare("engine", {"connection": {}}, f"{logs}/rank-0.log")
    assert Path(own["output_folder"]).name == "20261128-101500-4242"
    assert Path(own["output_folder"]).is_dir()
    assert log == f"{own['output_folder']}/rank-0.log"
    guest.remove_folder()
    assert list(tmp_path.iterdir()) == []


def test_a_rank_reads_its_connection_whole_while_the_next_is_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    link: Any = None
    guest = Guest(link)
    guest.answer({"op": "hello", "host": "b", "environment": {}, "logs": "/logs/x", "token": "t"})
    own, _ = guest.prepare("engine", {"connection": {"key": "k"}}, "rank-0.log")
    with open(own["connection_file"]) as opened:
        guest.prepare("engine", {"connection": {"key": "anew"}}, "rank-1.log")
        assert json.load(opened) == {"key": "k"}
    assert Path(own["connection_file"]).stat().st_mode & 0o777 == 0o600
    guest.remove_folder()
