"""Loops of a cell, of which a dry run makes the first two turns and the last.

A loop over a loader is shortened by the loader, one over a `range` by the cell's code, where it
trains. Which samples a batch has does not count: its size does.
"""

import ast
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.utils._pytree import tree_leaves
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    TensorDataset,
    default_collate,
    default_convert,
)

from nbdist.engine.compat import torch_dry
from nbdist.engine.dry.rank_log import RankLog
from nbdist.engine.dry.unknown import converted, formatted
from nbdist.engine.dry.values import Values

TURNS = 3  # that a long loop makes: the first two and the last
TURNS_WITH_BREAK = 12  # before the last, where the loop may end early
_TRAINING = ("backward", "step", "fit")
_LOOP, _FORMAT = "__dry_loop__", "__dry_format__"


def rewritten(code: str, file: str) -> Any:
    """Return a cell's code, compiled, whose loops that train are short.

    Raises:
        SyntaxError: It is no Python.
    """
    tree = ast.parse(code, file)
    tree = _Rewriter(_that_train(tree)).visit(tree)
    return compile(ast.fix_missing_locations(tree), file, "exec", dont_inherit=True)


def _that_train(tree: ast.AST) -> set[str]:
    """Return the functions of a cell that train, by themselves or by others."""
    functions = [one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef)]
    found: set[str] = set()
    while more := {one.name for one in functions if _trains(one.body, found)} - found:
        found |= more
    return found


def _trains(body: Sequence[ast.AST], functions: set[str]) -> bool:
    for node in (inner for one in body for inner in ast.walk(one)):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", None) or getattr(node.func, "id", "")
            if name in functions or name in _TRAINING:
                return True
    return False


class _Rewriter(ast.NodeTransformer):
    def __init__(self, functions: set[str]) -> None:
        self._functions = functions

    def visit_For(self, node: ast.For) -> ast.AST:
        self.generic_visit(node)
        ends_early = any(
            isinstance(inner, ast.Break | ast.Return | ast.Raise)
            for one in node.body
            for inner in ast.walk(one)
        )
        over, flags = node.iter, (_trains(node.body, self._functions), ends_early)
        given, start = [over], []
        if isinstance(over, ast.Call) and getattr(over.func, "id", "") == "enumerate":
            given, start = over.args, over.keywords or [ast.keyword("start", ast.Constant(0))]
        given = [*given[:1], *map(ast.Constant, flags), *given[1:]]
        call = ast.Call(_name(_LOOP), given, [] if len(given) > len(flags) + 1 else start)
        node.iter = ast.copy_location(call, over)
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        is_text = isinstance(node.left, ast.Constant) and isinstance(node.left.value, str)
        if isinstance(node.op, ast.Mod) and is_text:
            return ast.copy_location(ast.Call(_name(_FORMAT), [node.left, node.right], []), node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in ("float", "int", "bool"):
            node.func = ast.copy_location(_name(f"__dry_{node.func.id}__"), node.func)
        return node


def _name(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


class Loops:
    """The loops of this rank's cell."""

    def __init__(self, log: RankLog, values: Values, shard: Callable[[], int]) -> None:
        """Note turns in a log; `shard` gives the part of the data that is this rank's."""
        self._log, self._values, self._shard = log, values, shard
        self._may_end = False
        self._skipped = 0  # turns, of all loops
        self.left_out: set[str] = set()

    def names(self) -> dict[str, Any]:
        """Return what rewritten code calls."""
        kinds = {f"__dry_{kind.__name__}__": converted(kind) for kind in (float, int, bool)}
        return kinds | {_LOOP: self._loop, _FORMAT: formatted}

    def take_over(self) -> None:
        """Have all loaders of torch hand out few batches. Of this process, for good."""
        from nbdist.engine.data.loaders import Loader

        for kind in (DataLoader, Loader):
            kind.__iter__ = lambda loader: self._batches(loader)  # type: ignore[method-assign]

    def _loop(
        self, over: Any, trains: bool, ends_early: bool, start: int | None = None
    ) -> Iterator[Any]:
        """Yield what a loop of a cell is over; with `start`, and the number of each turn."""
        if isinstance(over, range) and trains:
            over = self._turns(over, len(over), over.__getitem__, ends_early=ends_early)
        number, turns = start or 0, None
        while True:
            was, self._may_end, before = self._may_end, ends_early, self._skipped
            try:
                turns = iter(over) if turns is None else turns
                one = next(turns)
            except StopIteration:
                return
            finally:
                self._may_end = was
            number += self._skipped - before
            yield one if start is None else (number, one)
            number += 1

    def _turns(
        self, over: Any, count: int, turn: Callable[[int], Any], *, ends_early: bool
    ) -> Iterator[Any]:
        loop = self._log.begin_loop()
        first = TURNS_WITH_BREAK if ends_early else TURNS - 1
        if self._log.runs_whole(loop):
            first = count
        try:
            for number in range(min(first, count)):
                self._log.turn(loop, number + 1, count)
                yield turn(number)
            if count > first + 1:
                self._skipped += count - first - 1
                what = "batches" if isinstance(over, DataLoader) else "turns"
                said = f"of {count:,} {what} of the loop at {loop[0]} the first {first} and the "
                unless = ", and an end in between is not seen" if ends_early else ""
                self.left_out.add(
                    f"{said}last were run, others count as the one before them{unless}"
                )
            if count > first:
                self._log.turn(loop, count, count)
                yield turn(count - 1)
        finally:
            self._log.turn(loop, 0, count)

    def _batches(self, loader: Any) -> Iterator[Any]:
        ends_early, self._may_end = self._may_end, False
        if isinstance(loader.dataset, IterableDataset):
            return self._stream(loader)
        samples = _samples_of(loader)
        self._log.asks_rank |= not (_is_plain(loader) or _takes_any(loader))
        count = len(loader)
        place = hash((self._shard_of(loader), getattr(loader, "epoch", 0), count))

        def batch(number: int) -> Any:
            made = _collated(loader, samples(number))
            self._values.write(tree_leaves(made), hash((place, number)))
            return made

        return self._turns(loader, count, batch, ends_early=ends_early)

    def _stream(self, loader: Any) -> Iterator[Any]:
        """Hand out all batches of a stream; the time a rank has ends one that is long."""
        items = iter(loader.dataset)
        size = loader.batch_size or 1
        while group := list(itertools.islice(items, size)):
            yield _collated(loader, group, are_samples=True)

    def _shard_of(self, loader: Any) -> object:
        sampler = getattr(loader, "sampler", None)
        if type(loader) is not DataLoader:
            return ("shard", self._shard())
        own = getattr(sampler, "rank", None)
        shuffles = "Random" in type(sampler).__name__
        return ("rank", own) if own is not None else self._values.random() if shuffles else 0


def _is_plain(loader: Any) -> bool:
    """Return whether its batches are made of the first samples, in order, on any rank."""
    return type(loader) is DataLoader and loader.batch_size is not None


def _takes_any(loader: Any) -> bool:
    """Return whether a batch is the same for any samples."""
    return type(loader.dataset) is TensorDataset and loader.collate_fn is default_collate


def _samples_of(loader: Any) -> Callable[[int], list[int]]:
    """Return a function that gives the samples of a batch by its number."""
    dataset_size = max(len(loader.dataset), 1)
    if _is_plain(loader):
        sampler: Any = loader.sampler
        in_all, size = len(sampler), loader.batch_size
        return lambda n: [i % dataset_size for i in range(n * size, min((n + 1) * size, in_all))]
    if loader.batch_sampler is None:  # samples one by one
        return lambda n: [n % dataset_size]
    groups: list[Any] = []
    order = torch_dry.on_numbers(lambda: iter(loader.batch_sampler))()
    take = torch_dry.on_numbers(lambda: next(order))

    def given(number: int) -> list[int]:
        while len(groups) <= number:
            groups.append(take())
        return list(groups[number])

    return given


def _collated(loader: Any, indices: Sequence[Any], *, are_samples: bool = False) -> Any:
    if _takes_any(loader):
        return [one[: len(indices)].clone() for one in loader.dataset.tensors]
    items = list(indices) if are_samples else [loader.dataset[index] for index in indices]
    if loader.batch_size is None and loader.batch_sampler is None:
        return default_convert(items[0])
    return loader.collate_fn(items)
