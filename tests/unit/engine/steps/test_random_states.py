"""What Python's, numpy's and torch's generators draw after a mark, they draw again."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.random import mtrand

from nbdist.engine.steps import random_states
from nbdist.engine.steps.step_state import StepBoundary

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


TORCH_DRAWS: dict[str, Callable[[], Any]] = {
    "uniform": lambda: torch.rand(1).tolist(),
    "normal, one of a pair": lambda: torch.randn(1).tolist(),
    "normal of 64 bits, one of a pair": lambda: torch.randn(1, dtype=torch.float64).tolist(),
    "all words": lambda: torch.rand(624).tolist(),  # as many as lead to the same index
    "a dropout": lambda: torch.nn.functional.dropout(torch.ones(3)).tolist(),
    "a permutation": lambda: torch.randperm(5).tolist(),
    "seeded": lambda: (torch.manual_seed(4), torch.rand(1).tolist())[1],
}


@pytest.mark.parametrize("draw", TORCH_DRAWS.values(), ids=list(TORCH_DRAWS))
def test_what_torch_drew_after_a_mark_is_drawn_again(draw: Callable[[], Any]) -> None:
    boundary = StepBoundary()
    with torch.random.fork_rng(devices=()):
        for _ in range(5):  # a number that is kept back is there at every second mark
            mark = boundary.random_numbers()
            assert torch.equal(mark.rng, torch.get_rng_state())
            first = [draw() for _ in range(3)]
            after = boundary.random_numbers()
            assert torch.equal(after.rng, torch.get_rng_state())
            boundary.start_over(mark)
            assert [draw() for _ in range(3)] == first
            boundary.start_over(after)


class _GpusGenerator:
    """Stands for a GPU's generator, and counts what its state costs."""

    device, seed, offset, asked = "cuda:0", 1, 0, 0

    def initial_seed(self) -> int:
        return self.seed

    def get_offset(self) -> int:
        return self.offset

    def get_state(self) -> tuple[int, int]:
        self.asked += 1
        return self.seed, self.offset


def test_a_gpus_generator_is_asked_for_its_state_when_it_has_been_drawn_from() -> None:
    generator, states = _GpusGenerator(), random_states._Cuda()
    assert [states.take(generator) for _ in range(3)] == 3 * [(1, 0)]
    generator.offset = 4
    assert [states.take(generator) for _ in range(3)] == 3 * [(1, 4)]
    generator.seed, generator.offset = 2, 0
    assert states.take(generator) == (2, 0)
    assert generator.asked == 3
