"""What a call cannot take is one sentence that repeats it, and costs nothing."""

from collections.abc import Callable
from typing import Any

import pytest

import nbdist
from nbdist import Session, UsageError
from nbdist.client.notebook import current


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
        {"virtual": 3},
        {"virtual": "h101, nvlink4"},
        {"tracking_uri": "foo://bar"},
    ],
)
def test_a_start_with_what_makes_no_sense_starts_nothing(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(current, "_current", None)  # that of other tests of this process
    with pytest.raises(UsageError) as raised:
        nbdist.start(**({"n": 2, "device": "cpu"} | asked))
    (value,) = asked.values()
    assert str(value) in raised.value.what


CALLS: dict[str, Callable[[Any], object]] = {
    "run(7)": lambda s: s.run(7),
    "ranks=[7]": lambda s: s.run("1", ranks=[7]),
    "timeout_s='7'": lambda s: s.run("1", timeout_s="7"),
    "retry='7'": lambda s: s.run("1", retry="7"),
    "checkpoint='7'": lambda s: s.run("1", checkpoint="7"),
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
    said = 'Rank 1 has no variable "nosuch"; a %%distributed cell sets one.'
    with pytest.raises(nbdist.TransferError) as raised:
        session.pull("nosuch", "1")
    assert str(raised.value) == said


def test_a_rank_that_did_not_run_the_cell_is_told_from_those_that_did(session: Session) -> None:
    with pytest.raises(KeyError, match=r"5 is none of this cell's ranks, which are \[0, 1\]"):
        session.run("1")[5]


CELLS = {
    "nbdist.log(3)": "nbdist.log takes numbers by name",
    "nbdist.keep(3)": "nbdist.keep takes objects by name",
    "nbdist.loader(range(64), 16)": "32 here for 16 per rank\n"
    "Do:  nbdist.loader(dataset, global_batch=32)",
    "nbdist.loader(range(64))": "global_batch=64",
    "nbdist.loader(range(64), global_batch=0)": "global_batch=0 gives 2 ranks nothing to share",
    "nbdist.loader(range(64), batch_size=16)": "nbdist.loader takes no batch_size.\n"
    "Why: global_batch= is of all ranks together: 32 here for 16 per rank\n"
    "Do:  nbdist.loader(dataset, global_batch=32)",
    "nbdist.loader(range(64), global_batch=16, shufle=True)": "nbdist.loader takes no shufle",
    "nbdist.loader(range(64), global_batch=16, seed='x')": "seed='x'",
    "nbdist.loader(range(64), global_batch=16, window=0)": "window=0",
    "nbdist.loader(range(64), global_batch=16, transform=3)": "transform=3",
    "nbdist.loader(range(64), global_batch=16, num_workers='x')": "num_workers='x'",
    "nbdist.restore(3)": "nbdist.restore takes a name, a folder or a URL, not 3",
    "nbdist.publish(3, 'x')": "nbdist.publish takes a model or its layout, not 3",
    "nbdist.Precision('int8')": "Precision's compute is 'int8'",
    "nbdist.Pipeline('foo')": "'foo' is not a pipeline schedule",
}


def test_ranks_refuse_what_they_cannot_take_and_name_the_cells_line(session: Session) -> None:
    for cell, sentence in CELLS.items():
        with pytest.raises(nbdist.RankError) as raised:
            session.run(f"pass\n{cell}")
        for name, text in raised.value.failures.values():
            assert name in ("UsageError", "PublishError", "LayoutError"), cell
            assert sentence in text, cell
        assert ", line 2" in raised.value.causes[0], cell
