"""Errors for people: what happened, why, what to do."""

import pickle

import pytest

from nbdist.client.notebook import current
from nbdist.engine.kernel.environment import rank_variables
from nbdist.shared import errors
from nbdist.shared.errors import ClusterError, Interrupted, NBDistError, RankError
from nbdist.shared.options import ClusterOptions
from nbdist.shared.placement import RankPlacement


def test_an_error_says_what_why_and_what_to_do_in_a_line_each() -> None:
    error = ClusterError("No engines.", why="stopped.", do="%dist start")
    assert str(error) == "No engines.\nWhy: stopped.\nDo:  %dist start"
    assert str(ClusterError("Just this.")) == "Just this."


def test_ipython_shows_the_text_and_no_frames() -> None:
    shown = ClusterError("No engines.", do="%dist start")._render_traceback_()
    assert shown == ["ClusterError: No engines.", "Do:  %dist start"]
    assert Interrupted("All have stopped.")._render_traceback_() == [
        "KeyboardInterrupt: All have stopped."
    ]


def test_every_error_survives_pickling() -> None:
    kinds = [k for k in vars(errors).values() if isinstance(k, type)]
    for kind in kinds:
        if issubclass(kind, NBDistError):
            again = pickle.loads(pickle.dumps(kind("what", why="why", do="do")))
            assert type(again) is kind
            assert str(again) == "what\nWhy: why\nDo:  do"
    failed = RankError("what", failures={1: ("ValueError", "x")})
    assert pickle.loads(pickle.dumps(failed)).failures == {1: ("ValueError", "x")}


def test_an_interrupt_is_a_keyboard_interrupt_and_no_ordinary_exception() -> None:
    assert issubclass(Interrupted, KeyboardInterrupt)
    assert not issubclass(Interrupted, Exception)
    assert Interrupted.__name__ == "KeyboardInterrupt"


def test_a_rank_that_asks_for_the_session_is_told_where_it_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = ClusterOptions(n=4, device="cpu", backend="gloo", threads=1)
    for name, value in rank_variables(3, options, RankPlacement()).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ClusterError, match="is for the notebook, and this is rank 3") as refused:
        current.current()
    assert "use rank, world_size" in refused.value.do
