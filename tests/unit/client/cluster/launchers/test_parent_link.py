"""Which processes of a host run, as its parent tells."""

from pathlib import Path
from typing import Any

from nbdist.client.cluster.launchers.parent_link import ParentLink
from nbdist.shared.errors import StartError
from nbdist.shared.processes.ended import Ended, EndKind

Exits = list[tuple[str, Ended]]
KILLED = Ended.from_status(-9)


def _link() -> tuple[ParentLink, list[dict[str, Any]], Exits]:
    sent: list[dict[str, Any]] = []
    exits: Exits = []
    return ParentLink(sent.append, lambda *told: exits.append(told), "b"), sent, exits


def _start(link: ParentLink, sent: list[dict[str, Any]], key: str, pid: int) -> None:
    future = link.start_soon(key, "engine", {}, Path("logs"))
    link.take(
        {"event": "started", "key": key, "number": sent[-1]["number"], "pid": pid, "port": None}
    )
    assert future.result(0).host == "b"


def _exited(key: str, pid: int) -> dict[str, Any]:
    return {"event": "exited", "key": key, "pid": pid, "ended": KILLED.to_wire()}


def test_the_end_of_a_process_is_told_once_and_then_it_runs_no_more() -> None:
    link, sent, exits = _link()
    _start(link, sent, "rank 0", 7)
    link.take(_exited("rank 0", 7))
    link.take(_exited("rank 0", 7))
    assert exits == [("rank 0", KILLED)]
    assert link.pids == {}


def test_the_late_end_of_a_killed_process_is_not_taken_for_its_successors() -> None:
    link, sent, exits = _link()
    _start(link, sent, "controller", 7)
    future = link.start_soon("controller", "controller", {}, Path("logs"))
    link.take(_exited("controller", 7))
    assert exits == []
    assert not future.done()


def test_a_process_whose_start_was_given_up_is_killed_as_it_comes() -> None:
    link, sent, _ = _link()
    link.start_soon("rank 0", "engine", {}, Path("logs"))
    number = sent[-1]["number"]
    link.give_up()
    link.take({"event": "started", "key": "rank 0", "number": number, "pid": 7, "port": None})
    assert sent[-1] == {"op": "signal", "pid": 7, "signal": 9, "group": True}
    assert link.pids == {}


def test_a_host_that_is_lost_takes_its_processes_with_it() -> None:
    link, sent, exits = _link()
    _start(link, sent, "rank 2", 7)
    future = link.start_soon("rank 3", "engine", {}, Path("logs"))
    lost = Ended(EndKind.HOST_LOST, host="b", detail="it does not answer")
    link.lose(StartError("Host b is lost."), lost)
    assert exits == [("rank 2", lost)]
    assert isinstance(future.exception(0), StartError)
