"""The process that holds the channels to hosts, as kernels and terminals find it."""

import asyncio
import os
import signal
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from nbdist.client.cluster.launchers.hosts.keeper_link import KeeperLink
from nbdist.host import keeper
from nbdist.shared.errors import ClusterError
from nbdist.shared.processes import detached

SLOW_TO_END = ("sh", "-c", "trap '' TERM; echo $$ > \"$0\"; while :; do sleep 0.1; done")


def test_a_detached_cluster_that_is_stopped_has_no_name_while_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = threading.Event()
    with tempfile.TemporaryDirectory(prefix="nb_", dir="/tmp") as sockets:  # their paths are short
        monkeypatch.setenv("XDG_RUNTIME_DIR", sockets)
        link = KeeperLink(tmp_path, lambda event: gone.set() if event["event"] == "gone" else None)
        try:
            pid = tmp_path / "pid"
            link.open("slow", (*SLOW_TO_END, str(pid)), {}, tmp_path / "slow.log")
            link.detach("mine", {"folder": "here"})
            assert [one.name for one in detached.find()] == ["mine"]
            while not (pid.exists() and pid.read_text()):
                time.sleep(0.01)
            link._send({"op": "quit"})
            assert gone.wait(30)
            with pytest.raises(ClusterError, match=r"There is no detached cluster mine\."):
                detached.choose(detached.find(), "mine")
            os.kill(int(pid.read_text()), signal.SIGKILL)
        finally:
            link.close()


def test_a_scheduler_that_does_not_answer_is_given_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(keeper, "_CANCEL_S", 0.1)
    command: Any = None  # it has ended
    asyncio.run(keeper.OpenChannel("slurm", command, ["sleep", "1234"]).cancel())
    assert capsys.readouterr().out == "sleep did not end in time\n"
    assert not any(one.cmdline()[:2] == ["sleep", "1234"] for one in psutil.Process().children())


def test_a_channel_without_room_for_its_log_still_says_how_it_ended(tmp_path: Path) -> None:
    closed: list[dict[str, Any]] = []
    heard = threading.Event()

    def hear(event: dict[str, Any]) -> None:
        if event["event"] == "closed":
            closed.append(event)
            heard.set()

    link = KeeperLink(tmp_path, hear)
    try:
        link.open("quick", ("sh", "-c", "echo why >&2; exit 3"), {}, tmp_path / "none" / "a.log")
        assert heard.wait(30)
        assert (closed[0]["status"], closed[0]["said"]) == (3, "why")
        assert link.alive
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
