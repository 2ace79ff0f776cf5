"""Names that mean different things on different ranks are found, and what is alike is not."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch")

from nbdist.engine.layout.layout import Layout  # noqa: E402
from nbdist.engine.recovery.clone.fingerprint import differing, fingerprint, of_names  # noqa: E402
from nbdist.engine.recovery.clone.loop_names import of_source  # noqa: E402


def nested() -> list[Any]:
    made: list[Any] = []
    for _ in range(500):
        made = [made]
    return made


def linear(seed: int, kind: Any = torch.nn.Linear) -> Any:
    torch.manual_seed(seed)
    return kind(2, 2)


def layout_after_a_step(batch: Any) -> Layout:
    layout: Layout = Layout.__new__(Layout)
    layout.last_step = batch  # each rank's own
    return layout


@pytest.mark.parametrize(
    "of_rank",
    [
        lambda rank: rank,
        lambda rank: rank == 0,
        lambda rank: f"ck{rank}.pt",
        lambda rank: Path(f"ck{rank}.pt"),
        lambda rank: range(rank, 600, 3),
        lambda rank: list(range(rank, 100_000, 3)),
        lambda rank: {"a": ({"b", rank},)},
        lambda rank: torch.utils.data.Subset([0] * 9, [rank]),
        lambda rank: SimpleNamespace(inner=SimpleNamespace(rank=rank)),
        lambda rank: torch.zeros(rank + 1),
        lambda rank: torch.full((3,), rank, dtype=torch.bfloat16),
        lambda rank: torch.randperm(50_000, generator=torch.Generator().manual_seed(rank)),
        lambda rank: linear(rank),
        lambda rank: torch.nn.Parameter(torch.tensor(0.1 * rank)),
        lambda rank: [torch.ones(2, 3).T * rank],
        lambda rank: np.arange(9).reshape(3, 3)[::-1] * rank,
        lambda rank: np.array([f"ck{rank}.pt"]),
        lambda rank: np.int64(rank),
        lambda rank: 10 ** (6000 + rank),
        lambda rank: -1 - rank,
        lambda rank: rank * (2**61 - 1),
        lambda rank: "\ud800" * (rank + 1),
        lambda rank: None if rank else threading.Lock(),
    ],
)
def test_values_made_from_a_ranks_number_differ(of_rank: Any) -> None:
    assert fingerprint(of_rank(0)) != fingerprint(of_rank(1))
    assert fingerprint(of_rank(1)) == fingerprint(of_rank(1))


@pytest.mark.parametrize(
    "make",
    [
        object,
        threading.Lock,
        lambda: torch.rand(3, requires_grad=True).sum(),  # a loss
        lambda: torch.ones(0, 3),
        lambda: torch.empty(2, device="meta"),
        lambda: torch.eye(3).to_sparse(),
        lambda: np.array([object()]),
        lambda: linear(0),
        lambda: torch.Generator().manual_seed(np.random.randint(99)),
        lambda: SimpleNamespace(_cache=np.random.rand()),
        lambda: layout_after_a_step(torch.rand(3)),
        lambda: {"f": lambda: 1, "nan": float("nan")},
        nested,
        lambda: {"one", "two", "three"},
    ],
)
def test_what_two_processes_make_alike_does_not(make: Any) -> None:
    assert fingerprint(make()) == fingerprint(make())


class Colliding(tuple[int, ...]):
    """Items of one hash, which lie in a set by the order in which they came."""

    __slots__ = ()

    def __hash__(self) -> int:
        return 0


def test_of_a_set_too_large_to_be_read_whole_the_order_is_no_part() -> None:
    parts = [Colliding(range(n, n + 60)) for n in range(150)]
    turned = parts[::-1]
    assert list(set(parts)) != list(set(turned))
    assert fingerprint(set(parts)) == fingerprint(set(turned))
    assert fingerprint(set(parts)) != fingerprint(set(parts[1:]))


def test_a_model_is_what_the_user_calls_it_though_a_clones_class_was_made_anew() -> None:
    wrapped = type("DDPLinear", (type("DDP", (), {}), torch.nn.Linear), {"__module__": "elsewhere"})
    assert fingerprint(linear(0, wrapped)) == fingerprint(linear(0))
    assert fingerprint(linear(0)) != fingerprint(torch.nn.Identity())


def test_names_that_a_loop_of_a_cell_binds_are_found_and_a_functions_own_are_not() -> None:
    cell = """
total = 0
def train():
    for inner in range(3):
        own = inner
for step, (x, y) in enumerate(loader):
    with torch.no_grad():
        shown = model(x)
    def helper():
        hidden = 1
while more:
    total += 1
"""
    assert of_source(cell) == {"step", "x", "y", "shown", "total"}
    assert of_source("for x in y: await x") == {"x"}
    assert of_source("%magic") == set()


def test_a_loop_of_references_ends() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    assert fingerprint(loop) == fingerprint(loop)


def test_the_sources_names_that_not_all_living_ranks_hold_alike_are_named() -> None:
    marks = {0: {"a": "1", "b": "1", "only": "1", "odd": ""}, 2: {"a": "1", "b": "2", "odd": "3"}}
    assert differing(marks, 0) == ["b", "only"]
    assert differing({0: marks[0]}, 0) == []


def test_a_value_that_cannot_be_read_says_nothing() -> None:
    class Odd:
        @property  # type: ignore[misc]  # objects may set theirs, which this one refuses
        def __class__(self) -> type:
            raise RuntimeError("no")

    assert of_names({"odd": Odd(), "one": 1}) == {"odd": "", "one": fingerprint(1)}
