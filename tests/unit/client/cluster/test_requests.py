"""Requests to ranks that answer, fail, or end."""

import threading
from typing import Any

import pytest

from nbdist.client.cluster.connection import Message
from nbdist.client.cluster.requests import RankDiedError, RankFailedError, Requests
from nbdist.shared import wire
from nbdist.shared.processes.ended import Ended
from nbdist.shared.wire import CellStart
from tests.unit.fakes import FakeConnection


@pytest.fixture
def connection() -> FakeConnection:
    return FakeConnection()


@pytest.fixture
def requests(connection: FakeConnection) -> Requests:
    made = Requests()
    made.use(connection)
    return made


def reply(**content: Any) -> Message:
    return Message(wire.REPLY, content, {}, [], reply=True)


def test_an_answer_is_the_future_s_value(requests: Requests, connection: FakeConnection) -> None:
    future = requests.ask(0, "control.state")
    next(iter(connection.handlers.values()))(reply(value=3))
    assert future.result(0) == 3


def test_an_error_names_its_rank(requests: Requests, connection: FakeConnection) -> None:
    future = requests.ask(1, "control.state")
    next(iter(connection.handlers.values()))(reply(error="ValueError: no"))
    with pytest.raises(RankFailedError, match="rank 1: ValueError: no"):
        future.result(0)


def test_a_death_fails_what_was_asked_and_what_is_asked_after_it(requests: Requests) -> None:
    before, other = requests.ask(1, "control.state"), requests.ask(0, "control.state")
    requests.rank_died(1, Ended.from_status(-9))
    # Its id stays registered for a moment: a message would be sent, and never be answered.
    after = requests.ask(1, "control.state")
    for future in (before, after):
        with pytest.raises(
            RankDiedError, match=r"Rank 1 has ended.*\nWhy: its process: killed by SIGKILL"
        ):
            future.result(0)
    with pytest.raises(RankDiedError, match="killed by SIGKILL"):
        requests.execute(1, "pass", CellStart(1, (0,), 1), lambda message: None)
    assert not other.done()


def test_a_rank_with_a_new_process_is_asked_again(requests: Requests) -> None:
    requests.rank_died(1, Ended.from_status(-9))
    requests.begins(1)
    assert not requests.ask(1, "control.state").done()


def test_nothing_is_kept_of_what_a_dead_rank_was_asked(
    requests: Requests, connection: FakeConnection
) -> None:
    requests.ask(1, "control.state")
    requests.rank_died(1, Ended.from_status(-9))
    assert connection.handlers == {}


def test_a_reply_and_a_death_at_the_same_moment_raise_nothing(
    requests: Requests, connection: FakeConnection
) -> None:
    for _ in range(200):
        future = requests.ask(1, "control.state")
        handler = next(iter(connection.handlers.values()))
        errors: list[BaseException] = []
        start = threading.Barrier(2)

        def answer(
            handler: Any = handler, start: Any = start, errors: list[BaseException] = errors
        ) -> None:
            start.wait(30)
            try:
                handler(reply(value=1))
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=answer)
        thread.start()
        start.wait(30)
        requests.rank_died(1, Ended.from_status(1))
        thread.join(30)
        assert future.done()
        assert not errors
        requests.begins(1)
