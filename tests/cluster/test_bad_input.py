"""What a call cannot take is one sentence that repeats it, and costs nothing."""

from collections.abc import Callable
from typing import Any

import pytest

import nbdist
from nbdist import Session, UsageError


@pytest.mark.parametrize(
    "asked",
    [
        {"n": "2"},
        {"n": 2.5},
        {"n": True},
        {"threads": "x"},
        {"timeout": "x"},
        {"quiet": "x"},
        {"peer_snapshots": "x"},
        {"theme": 3},
        {"view": 3},
        {"detach": 3},
        {"tracking_uri": 3},
        {"tracking_uri": "foo://bar"},
    ],
)
def test_a_start_with_what_makes_no_sense_starts_nothing(asked: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as raised:
        nbdist.start(**({"n": 2, "device": "cpu"} | asked))
    (value,) = asked.values()
    assert str(value) in raised.value.what


CALLS: dict[str, Callable[[Any], object]] = {
    "run(7)": lambda s: s.run(7),
    "ranks=[7]": lambda s: s.run("1", ranks=[7]),
    "timeout_s='7'": lambda s: s.run("1", timeout_s="7"),
    "params=7": lambda s: s.run("1", params=7),
    "run_script(7)": lambda s: s.run_script(7),
    "sweep of 7": lambda s: s.sweep("1", {"lr": 7}),
    "sweep of '7'": lambda s: s.sweep("1", {"lr": "7"}),
    "sweep of {}": lambda s: s.sweep("1", {}),
    "scale('7')": lambda s: s.scale("7"),
    "scale(7.5)": lambda s: s.scale(7.5),
    "expect(7)": lambda s: s.expect(7),
    "stacks(7)": lambda s: s.stacks(7),
    "restart(7)": lambda s: s.restart(7),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_session_refuses_what_it_cannot_take(call: str, session: Session) -> None:
    with pytest.raises(UsageError) as raised:
        CALLS[call](session)
    assert "7" in raised.value.what or "{}" in raised.value.what


def test_a_variable_that_no_cell_has_set_is_named_with_what_to_do(session: Session) -> None:
    with pytest.raises(nbdist.TransferError, match='no variable "nosuch"') as raised:
        session.pull("nosuch")
    assert raised.value.do


def test_a_rank_that_did_not_run_the_cell_is_told_from_those_that_did(session: Session) -> None:
    with pytest.raises(KeyError, match=r"5 is none of this cell's ranks, which are \[0, 1\]"):
        session.run("1")[5]
