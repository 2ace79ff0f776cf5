"""One rank's messages during a cell."""

from typing import Any

import pytest

from nbdist.client.cells.listener import RankListener
from nbdist.client.cluster.connection import Message
from nbdist.client.output.live_text import LiveText
from nbdist.client.output.slots import Slots
from nbdist.shared import wire
from nbdist.shared.processes.ended import Ended


class Heard:
    """A collector, and what it passed on."""

    def __init__(self) -> None:
        self.batches: list[wire.Batch] = []
        self.news = 0
        self.text = LiveText(Slots(live=False), [0])
        self.collector = RankListener(0, self.text, self.batches.append, self.count)

    def count(self) -> None:
        self.news += 1

    def take(self, kind: str, content: dict[str, Any], *, reply: bool = False) -> None:
        self.collector.on_message(Message(kind, content, {}, [], reply))


def test_text_and_displays_are_gathered_in_order() -> None:
    heard = Heard()
    heard.take(wire.OUTPUT, {"parts": [["stdout", "a\n"]]})
    heard.take("display_data", {"data": {"text/html": "<b>", "text/plain": "b"}, "metadata": {}})
    heard.take(wire.OUTPUT, {"parts": [["stderr", "c\n"]]})
    kinds = [type(item).__name__ for item in heard.text.items()[0]]
    assert kinds == ["OutputLine", "Shown", "OutputLine"]


def test_a_reply_settles_the_rank_and_carries_its_summary() -> None:
    heard = Heard()
    assert not heard.collector.settled
    summary = {"first_seq": 1, "next_seq": 4}
    heard.take("execute_reply", {"status": "ok", wire.CELL_KEY: summary}, reply=True)
    assert heard.collector.settled
    assert heard.collector.failure is None
    assert heard.collector.summary.next_seq == 4
    assert heard.news == 1
    heard.take("status", {"execution_state": "idle"})
    assert heard.collector.idle.is_set()
    assert heard.news == 1  # the loop waits for that by itself


def test_a_rank_that_has_sent_no_output_has_none_to_be_waited_for() -> None:
    heard = Heard()
    heard.take("execute_reply", {"status": "ok"}, reply=True)
    assert not heard.collector.idle.is_set()
    silent = Heard()
    silent.take("execute_reply", {"status": "ok", wire.SILENT_KEY: True}, reply=True)
    assert silent.collector.idle.is_set()


def test_an_error_reply_is_a_failure() -> None:
    heard = Heard()
    content = {"status": "error", "ename": "E", "evalue": "why", "traceback": ["t"]}
    heard.take("execute_reply", content, reply=True)
    assert heard.collector.failure is not None
    assert (heard.collector.failure.ename, heard.collector.failure.evalue) == ("E", "why")


def test_a_cell_that_the_rank_dropped_is_a_failure_too() -> None:
    heard = Heard()
    heard.take("execute_reply", {"status": "aborted"}, reply=True)
    assert heard.collector.failure is not None
    assert heard.collector.failure.ename == "Aborted"


def test_a_death_settles_a_rank_that_had_not_replied_and_no_other() -> None:
    heard = Heard()
    heard.collector.died(Ended.from_status(-9))
    assert heard.collector.settled
    assert heard.collector.death == Ended.from_status(-9)
    assert heard.collector.idle.is_set()
    late = Heard()
    late.take("execute_reply", {"status": "ok"}, reply=True)
    late.collector.died(Ended.from_status(-9))
    assert late.collector.death is None


def test_records_are_passed_on() -> None:
    heard = Heard()
    batch = wire.Batch(0, (wire.Record(0, 5, "log", 1, 2, {"x": 1.0}),))
    heard.take(wire.RECORDS, batch.to_wire())
    assert heard.batches == [batch]


@pytest.mark.parametrize("kind", ["device", "links"])
def test_what_a_rank_tells_of_itself_each_second_is_no_sign_of_progress(kind: str) -> None:
    heard = Heard()
    before = heard.collector.heard_at
    batch = wire.Batch(0, (wire.Record(0, 5, kind, 1, 2, {"x": 1.0}),))
    heard.take(wire.RECORDS, batch.to_wire())
    assert heard.collector.heard_at == before
    heard.take(wire.RECORDS, wire.Batch(0, (wire.Record(0, 6, "step", 1, 2, {}),)).to_wire())
    assert heard.collector.heard_at > before
