"""Run a forward twice: to see what it asks of its experts, and to hand it what their owners made.

In the first run an expert's result is a placeholder, so that all calls are known before one of them
is computed, in whichever order they come. Only the lines of the forward itself run twice. Modules
that it calls before its experts run once, and the second run gets what they made; the first ends
where another module comes after them. Random numbers, attributes and buffers are put back between
the two. That both ask the same, and that the first has changed nothing that the second reads, is
checked: experts that feed each other, such as the layers of a model, are none.
"""

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from nbdist.engine.layout.plan import random_numbers
from nbdist.shared.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Call:
    """A call of an expert.

    Attributes:
        number: Of the expert.
        rows: What it was given (..., H).
    """

    number: int
    rows: Tensor


@dataclass(frozen=True, slots=True)
class _Made:
    """A module's call in the first run, and the random generators after it."""

    module: nn.Module
    inputs: list[Any]
    output: Any
    random: list[Tensor]


class _Enough(BaseException):
    """Ends the first run."""


class _StandIn:
    """Takes a module's place among those of a forward: a call of it is somebody else's."""

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        vars(self).update(_module=module, _call=call)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # for `isinstance`
        return type(self._module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        return self._call(self._module, args, keywords)


class Twice:
    """One forward of a module that calls experts. Main thread, or autograd's.

    Attributes:
        calls: Those of experts, in the order in which the forward makes them.
    """

    def __init__(
        self,
        name: str,
        parent: nn.Module,
        forward: Callable[..., Any],
        experts: Sequence[nn.Module],
        keyword: str | None,
        *,
        on_gpu: bool,
    ) -> None:
        """Prepare; `forward` is that of `parent`, and `keyword` what an expert is called with."""
        self.calls: list[Call] = []
        self._name, self._parent, self._forward = name, parent, forward
        self._numbers = {id(expert): number for number, expert in enumerate(experts)}
        self._keyword, self._on_gpu = keyword, on_gpu
        self._made: deque[_Made] = deque()
        self._watched: list[tuple[Tensor, int]] = []  # with their versions
        self._unequal: list[Tensor] = []
        self._began: list[Tensor] = []  # states of the random generators, as the next
        self._later: list[Tensor] = []

    @property
    def given(self) -> list[Tensor]:
        """What the forward was given, and what modules before the experts made."""
        return [tensor for tensor, _ in self._watched if tensor.is_floating_point()]

    def look(
        self,
        args: tuple[Any, ...],
        keywords: Mapping[str, Any],
        placeholder: Callable[[Tensor], Tensor],
    ) -> None:
        """Find the calls of experts.

        Raises:
            LayoutError: The forward changes what it was given, or calls experts in another way.
        """
        self._watched = _versions((args, keywords))
        self._began = random_numbers.states(self._on_gpu)
        asked = partial(self._ask, placeholder)
        with as_before(self._parent), self._standing_in(asked), suppress(_Enough):
            self._forward(*args, **keywords)
        if any(tensor._version != version for tensor, version in self._watched):
            raise self._refused("changes in place what it is given, or what its modules make")

    def _ask(
        self,
        placeholder: Callable[[Tensor], Tensor],
        module: nn.Module,
        args: tuple[Any, ...],
        keywords: dict[str, Any],
    ) -> Any:
        number = self._numbers.get(id(module))
        if number is not None:
            rows = rows_in(args, keywords, self._keyword)
            if rows is None:
                raise self._refused("calls an expert with something else than rows (..., H)")
            self.calls.append(Call(number, rows))
            return placeholder(rows)
        if self.calls and _has_tensors(module):
            raise _Enough
        output = module(*args, **keywords)
        if not self.calls:
            random = random_numbers.states(self._on_gpu)
            self._made.append(_Made(module, tree_leaves((args, keywords)), output, random))
            self._watched += _versions(output)
        return output

    def run(
        self, args: tuple[Any, ...], keywords: Mapping[str, Any], results: Sequence[Tensor]
    ) -> Any:
        """Return the forward's output, with these results of `calls`.

        Raises:
            LayoutError: It asks for something else than it did the first time.
        """
        left = deque(zip(self.calls, results, strict=True))
        # Experts draw after what the first run has drawn, and what it has not come to after them.
        self._later = random_numbers.states(self._on_gpu)
        random_numbers.restore(self._began)
        with self._standing_in(partial(self._answer, left)):
            output = self._forward(*args, **keywords)
        self._go_on_drawing()
        self._compare(not left and not self._made, [], [])
        if self._unequal and bool(torch.stack(self._unequal).any()):
            self._compare(False, [], [])
        return output

    def _answer(
        self,
        left: deque[tuple[Call, Tensor]],
        module: nn.Module,
        args: tuple[Any, ...],
        keywords: dict[str, Any],
    ) -> Any:
        number = self._numbers.get(id(module))
        if number is not None:
            asked, result = left.popleft() if left else (None, None)
            is_same = asked is not None and asked.number == number
            rows = rows_in(args, keywords, self._keyword)
            self._compare(is_same, [asked and asked.rows], [rows])
            return result
        if self._made:
            made = self._made.popleft()
            self._compare(made.module is module, made.inputs, tree_leaves((args, keywords)))
            random_numbers.restore(made.random)
            return made.output
        if _has_tensors(module):
            self._go_on_drawing()
        return module(*args, **keywords)

    def _go_on_drawing(self) -> None:
        random_numbers.restore(self._later)
        self._later = []

    def _compare(self, is_same: bool, before: list[Any], now: list[Any]) -> None:
        pairs = list(zip(before, now, strict=False))
        for one, other in pairs:
            if not isinstance(one, Tensor) or one is other:
                continue
            is_same &= isinstance(other, Tensor) and one.shape == other.shape
            if is_same and one.numel():
                a, b = one.detach(), other.detach()
                # What is no number equals itself here: to tell of it is not our part.
                self._unequal.append(((a != b) & ((a == a) | (b == b))).any())
        if not is_same or len(before) != len(now):
            raise self._refused("asks its experts, or modules before them, for something else")

    def _refused(self, what: str) -> LayoutError:
        return LayoutError(
            f"The forward of {self._name} {what}, where ep runs it a second time.",
            why="ep runs its lines twice, to send all tokens at once: what experts get must "
            "follow from its inputs alone, and not from another expert",
            do='leave ep out, and use "zero3", which shards any model',
        )

    @contextmanager
    def _standing_in(self, call: Callable[..., Any]) -> Iterator[None]:
        places = list(_called_in(self._parent))
        for owner, name, module in places:
            modules: dict[str, Any] = owner._modules
            modules[name] = _StandIn(module, call)
        try:
            yield
        finally:
            for owner, name, module in places:
                owner._modules[name] = module


def is_mere_list(module: nn.Module) -> bool:
    """Return whether a module only holds others, and cannot be called."""
    return type(module).forward is nn.Module.forward


def _called_in(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Yield the modules that a forward may call, with who holds them under which name."""
    for name, child in module._modules.items():
        if child is not None and is_mere_list(child):
            yield from _called_in(child)
        elif child is not None:
            yield module, name, child


def rows_in(
    args: tuple[Any, ...], keywords: Mapping[str, Any], keyword: str | None
) -> Tensor | None:
    """Return the one tensor (..., H) of a call, by position or by this keyword; None for others."""
    given = args if keyword is None else (keywords.get(keyword),)
    if len(given) != 1 or len(args) + len(keywords) != 1 or not isinstance(given[0], Tensor):
        return None
    return given[0] if given[0].is_floating_point() and given[0].dim() > 1 else None


def called(expert: nn.Module, rows: Tensor, keyword: str | None) -> Tensor:
    """Return what an expert makes of rows, by position or by this keyword."""
    made: Tensor = expert(rows) if keyword is None else expert(**{keyword: rows})
    return made


def _has_tensors(module: nn.Module) -> bool:
    return any(True for _ in chain(module.parameters(), module.buffers()))


def _versions(tree: Any) -> list[tuple[Tensor, int]]:
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    return [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]


@contextmanager
def as_before(module: nn.Module) -> Iterator[None]:
    """Put back a module's own attributes, with what they hold, and buffers."""
    before, buffers = dict(vars(module)), dict(module._buffers)
    kinds = (list, dict, set)
    held: list[Any] = [(v, copy.copy(v)) for v in before.values() if type(v) in kinds]
    for name, buffer in buffers.items():
        module._buffers[name] = None if buffer is None else buffer.clone()
    try:
        yield
    finally:
        vars(module).clear()
        vars(module).update(before)
        for value, content in held:
            value.clear()
            (value.extend if type(value) is list else value.update)(content)
