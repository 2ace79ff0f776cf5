"""What a rank tells of itself while its main thread is busy."""

import time
from collections.abc import Callable
from typing import Any

from tests.group import faults, states
from tests.group.engines import Engine, cluster


def ask_until(engine: Engine, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Ask one rank until its answer is as wanted."""
    deadline = time.monotonic() + 30
    while True:
        answer: dict[str, Any] = engine.now(states.state)
        if holds(answer):
            return answer
        assert time.monotonic() < deadline, answer
        time.sleep(0.01)


def is_waiting(answer: dict[str, Any]) -> bool:
    return answer["waiting"] is not None


def test_a_rank_tells_what_it_waits_in_with_whom_and_from_which_line() -> None:
    with cluster(3) as ranks:
        ranks.run(states.begin)
        for engine in ranks.engines[:2]:
            engine.post(states.run_cell, "\ndist.barrier(group=held['sub'])\ndist.all_reduce(x)")
        # What an answer holds is read one after the other: it is of one moment once the rank has
        # come where it stays, for rank 2 never comes.
        ask_until(
            ranks.engines[0], lambda a: is_waiting(a) and a["waiting"]["kind"] == "all_reduce"
        )
        first = ranks.engines[0].now(states.state)
        waiting = first["waiting"]
        assert waiting["kind"] == "all_reduce"
        assert (waiting["group"], waiting["seq"], waiting["bytes"]) == ("0", 1, 16)
        assert waiting["ranks"] == [0, 1, 2]
        assert waiting["peer"] is None
        assert waiting["line"].endswith("cell.py:3")
        assert first["doing"] == "waiting"
        assert first["where"]["line"] == 3
        assert first["where"]["function"] == "all_reduce"
        assert first["counts"] == {"0": 1, "1": 1, "init_process_group": 0}
        idle = ranks.engines[2].now(states.state)
        assert (idle["doing"], idle["waiting"], idle["where"]) == ("idle", None, None)
        assert idle["counts"] == {"0": 0, "init_process_group": 0}
        ranks.now(faults.abort)
        [engine.result() for engine in ranks.engines[:2]]


def test_a_rank_that_waits_for_a_message_names_the_peer_and_the_messages_number() -> None:
    with cluster(3) as ranks:
        ranks.run(states.begin)
        ranks.engines[2].post(states.run_cell, "dist.send(x, 1)")
        ranks.engines[1].post(states.run_cell, "dist.recv(x, 2)\ndist.recv(x, 2)")
        answer = ask_until(ranks.engines[1], lambda a: a["received"] == {"0/2": 2})
        waiting = ask_until(ranks.engines[1], is_waiting)["waiting"]
        assert (waiting["kind"], waiting["peer"], waiting["seq"]) == ("recv", 2, 2)
        assert (answer["sent"], answer["counts"]["0"]) == ({}, 0)
        ranks.engines[2].result()
        assert ranks.engines[2].now(states.state)["sent"] == {"0/1": 1}
        ranks.now(faults.abort)
        ranks.engines[1].result()


def test_a_rank_that_waits_in_the_store_says_so() -> None:
    with cluster(2) as ranks:
        ranks.run(states.begin)
        ranks.engines[0].post(states.run_cell, "\ndist.new_group([0, 1])")
        answer = ask_until(ranks.engines[0], is_waiting)
        waiting = answer["waiting"]
        assert (waiting["kind"], waiting["group"], waiting["ranks"]) == ("store", "", [0, 1])
        assert waiting["line"].endswith("cell.py:2")
        assert answer["doing"] == "waiting"
        ranks.now(faults.abort)
        ranks.engines[0].result()


def test_a_rank_that_loads_data_and_one_that_computes_say_so() -> None:
    with cluster(2) as ranks:
        ranks.run(states.begin)
        ranks.engines[0].post(states.run_cell, "next(iter(DataLoader(Slow())))")
        ranks.engines[1].post(states.run_cell, "def work():\n    sleep(2)\nwork()")
        assert ask_until(ranks.engines[0], lambda a: a["doing"] != "idle")["cell"] == 5
        ask_until(ranks.engines[0], lambda a: a["doing"] == "loading data")
        answer = ask_until(ranks.engines[1], lambda a: a["doing"] == "computing")
        ask_until(ranks.engines[1], lambda a: a["where"] and a["where"]["function"] == "work")
        assert answer["waiting"] is None
        ranks.results()
        assert ranks.engines[0].now(states.state)["doing"] == "idle"
