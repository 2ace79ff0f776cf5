"""The file of events of a real cluster: what a bug report needs, and nothing that is secret."""

import pytest

from nbdist import RankError, Session
from nbdist.client.cluster.events import read_events


def test_a_fault_can_be_followed_line_by_line(session: Session) -> None:
    with pytest.raises(RankError):
        session.run(
            "if rank == 1: raise ValueError('my password is hunter2')\n"
            "dist.all_reduce(torch.ones(1))"
        )

    events = read_events(session.events)
    told = [event["event"] for event in events]
    last = events[len(told) - 1 - told[::-1].index("cell begun") :]
    names = [event["event"] for event in last]
    assert names[:3] == ["cell begun", "rank failed", "cut links"]
    assert names[-2:] == ["re-formed", "cell ended"]
    assert last[1]["cause"] == "ValueError"
    assert last[1]["rank"] == 1
    assert last[1]["place"].endswith("line 1")
    assert last[-1]["outcome"] == "failed"
    assert "hunter2" not in session.events.read_text()


def test_it_begins_with_versions_options_and_processes(session: Session) -> None:
    events = read_events(session.events)

    start = next(event for event in events if event["event"] == "start")
    assert start["n"] == 2
    assert {"python", "torch", "ipyparallel", "ipykernel"} <= set(start["versions"])
    keys = {event["key"] for event in events if event["event"] == "process started"}
    assert {"controller", "store", "rank 0", "rank 1"} <= keys
