"""What runs, and how what ran has ended, as a kernel that attaches is told."""

from nbdist.host.process_table import ProcessTable


def started(key: str, pid: int) -> dict[str, object]:
    return {"event": "started", "channel": "a#1", "host": "a", "key": key, "pid": pid}


def exited(key: str, pid: int) -> dict[str, object]:
    return {"event": "exited", "channel": "a#1", "key": key, "pid": pid}


def test_a_process_that_was_replaced_runs_under_its_new_pid_whichever_event_comes_first() -> None:
    table = ProcessTable()
    table.take(started("rank 0", 1))
    table.take(started("rank 1", 2))
    table.take(started("rank 1", 3))
    table.take(exited("rank 1", 2))
    told = table.told()
    assert told["running"] == {"a#1": {"rank 0": 1, "rank 1": 3}}
    assert [event["pid"] for event in told["ended"]] == [2]


def test_a_lost_host_is_told_and_a_beat_is_not() -> None:
    table = ProcessTable()
    table.take({"event": "beat", "channel": "a#1", "host": "a"})
    table.take({"event": "lost", "channel": "a#1", "host": "a", "why": "silent"})
    assert table.told() == {
        "running": {},
        "ended": [],
        "lost": [{"event": "lost", "channel": "a#1", "host": "a", "why": "silent"}],
    }
