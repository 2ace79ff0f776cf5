"""Python's and numpy's generators are read from memory, and go back to what they were."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.random import mtrand

from nbdist.engine.compat import random_states

DRAWS: dict[str, Callable[[], Any]] = {
    "python": random.random,
    "python, one of a pair": lambda: random.gauss(0, 1),
    "python, seeded": lambda: (random.seed(4), random.random()),
    "numpy": np.random.rand,
    "numpy, one of a pair": np.random.randn,
    "numpy, seeded": lambda: (np.random.seed(4), np.random.rand()),
    "numpy, all words": lambda: np.random.rand(312).tolist(),  # as many as lead to the same index
    "both": lambda: (random.random(), np.random.rand()),
    "nothing": lambda: None,
}


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    yield
    random.setstate(python)
    np.random.set_state(numpy)


def test_the_words_are_read_from_memory_in_this_python() -> None:
    assert random_states.check() == []


@pytest.mark.parametrize("draw", DRAWS.values(), ids=list(DRAWS))
def test_what_was_drawn_after_a_mark_is_drawn_again(draw: Callable[[], Any]) -> None:
    for _ in range(5):  # a number that is kept back is there at every second mark
        state = random_states.take()
        told = random.getstate(), repr(np.random.get_state())
        first = [draw() for _ in range(3)]
        after = random_states.take()
        later = draw()
        random_states.put_back(state)
        assert (random.getstate(), repr(np.random.get_state())) == told
        assert [draw() for _ in range(3)] == first
        random_states.put_back(after)
        assert draw() == later


def test_another_python_whose_generator_looks_otherwise_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(random_states._Python, "_agrees", lambda _self: False)
    other = random_states._Python(random.Random(3))
    assert not other.is_read()
    state = other.take()
    first = other._generator.random()
    other.put_back(state)
    assert other._generator.random() == first


def test_a_generator_that_numpy_was_given_is_put_back_too() -> None:
    before = mtrand.get_bit_generator()
    mtrand.set_bit_generator(np.random.PCG64(5))
    try:
        state = random_states.take()
        first = np.random.rand(3).tolist()
        random_states.put_back(state)
        assert np.random.rand(3).tolist() == first
    finally:
        mtrand.set_bit_generator(before)


def test_numpy_is_asked_only_when_it_was_drawn_from(monkeypatch: pytest.MonkeyPatch) -> None:
    np.random.seed(0)
    random_states.take()
    asked: list[int] = []
    ask = np.random.get_state

    def counted(**more: Any) -> Any:
        asked.append(1)
        return ask(**more)

    monkeypatch.setattr(np.random, "get_state", counted)
    for _ in range(3):
        random.random()
        random_states.take()
    assert not asked
    np.random.rand()
    random_states.take()
    assert asked == [1]
