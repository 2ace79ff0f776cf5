"""The process that holds the channels to hosts, as kernels and terminals find it."""

import socket
import tempfile
import threading
from pathlib import Path

import pytest

from nbdist.client.cluster.launchers.keeper_link import KeeperLink
from nbdist.shared import detached
from nbdist.shared.errors import ClusterError

SLOW_TO_END = ("sh", "-c", "trap '' TERM; echo begun; while :; do sleep 0.1; done")


def test_a_detached_cluster_that_is_stopped_has_no_name_while_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = threading.Event()
    with tempfile.TemporaryDirectory(prefix="nb_", dir="/tmp") as sockets:  # their paths are short
        monkeypatch.setenv("XDG_RUNTIME_DIR", sockets)
        link = KeeperLink(tmp_path, lambda event: gone.set() if event["event"] == "gone" else None)
        try:
            link.open("slow", SLOW_TO_END, {}, tmp_path / "slow.log")
            link.detach("mine", {"folder": "here"})
            assert [one.name for one in detached.find()] == ["mine"]
            link._send({"op": "quit"})
            assert gone.wait(30)
            with pytest.raises(ClusterError, match=r"There is no detached cluster mine\."):
                detached.choose(detached.find(), "mine")
        finally:
            link.close()


def test_a_keeper_that_is_told_to_be_gone_is_not_alive(tmp_path: Path) -> None:
    # Whoever hears of it opens hosts anew, by another keeper. The process may be there for a while.
    told: list[bool] = []
    gone = threading.Event()

    def hear(event: dict[str, object]) -> None:
        if event["event"] == "gone":
            told.append(link.alive)
            gone.set()

    link = KeeperLink(tmp_path, hear)
    assert link.alive
    link._channel.shutdown(socket.SHUT_RD)  # as its end does, before the process is reaped
    assert gone.wait(30)
    assert told == [False]
    link.close()
