"""Put back what a cell that is run again moves before its loop continues.

Passes over a loader that were done give no batch, and the code around them runs all the same:
`n = 0` before the loops, a scheduler's step behind each. So all that follows the steps is noted as
the cell begins again, and put back where its training continues; what cannot be put back is named.

Main thread.
"""

import io
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import nn

from nbdist.engine.steps.followers.find_followers import has_state
from nbdist.engine.steps.followers.followers import Followers
from nbdist.engine.steps.followers.grown_lists import is_length
from nbdist.engine.steps.followers.marks import Mark, mark
from nbdist.engine.steps.followers.numbers import Number, is_option
from nbdist.engine.steps.optimizer_options import Options, options_of, put_options

_MOST_NAMES = 8  # in a sentence
_PLAIN = (int, float, str, bool)

_log = logging.getLogger("nbdist.steps")


@dataclass(frozen=True, slots=True)
class _Object:
    """What follows the steps: its mark, and its state, b"" where it cannot be put back."""

    kind: type[Any]
    number: int
    mark: Mark
    state: bytes

    @classmethod
    def of(cls, one: Any) -> "_Object":
        return cls(type(one), id(one), mark(one), _frozen(one))

    def put_into(self, one: Any) -> bool:
        """Give an object this state; return whether it can have it."""
        if type(one) is not self.kind or not self.state:
            return False
        try:
            one.load_state_dict(torch.load(io.BytesIO(self.state), weights_only=False))
        except Exception:  # the user's class: it is named
            _log.exception("A %s does not take the state that it had", type(one).__name__)
            return False
        return True


@dataclass(slots=True)
class _CellState:
    """How all stood as the cell began again."""

    objects: dict[str, _Object]
    options: list[tuple["ref[torch.optim.Optimizer]", str, Options]]  # none lives by this
    numbers: dict[str, Number]
    lists: dict[str, list[Any]]
    counts: tuple[str, ...] = ()  # what loops themselves count by
    lost: tuple[str, ...] = ()  # lists that are shorter than they are to be


@dataclass(frozen=True, slots=True)
class PutBack:
    """What has come of it, by name.

    Attributes:
        done: What stands again as it stood.
        left: What does not, with its class.
        differs: Numbers that the cell has set, with what they were, and are.
        restarted: Loop variables that count from their begin.
    """

    done: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    differs: tuple[tuple[str, Number, Number], ...] = ()
    restarted: tuple[str, ...] = ()

    @property
    def sentences(self) -> tuple[str, ...]:
        """What is said of it."""
        said = []
        if self.done:
            is_are = "is" if len(self.done) == 1 else "are"
            said.append(
                "Code before and between its loops ran again; put back to where the training "
                f"stood {is_are} {_names(self.done)}."
            )
        if self.left:
            said.append(
                f"Not as it stood, and not to be put back: {_names(self.left)}. See to it before "
                "the result is trusted."
            )
        said += [
            f"{name} was {was} and is {now}: the cell sets it before its loops."
            for name, was, now in self.differs[:_MOST_NAMES]
        ]
        if self.restarted:
            said.append(
                f"Counted from its begin again: {_names(self.restarted)}. What the loop does by "
                "that comes at other steps than without the fault."
            )
        return tuple(said)


class RepeatedEpochs:
    """What the cell that runs again has gone through before its training continues."""

    def __init__(self, followers: Followers) -> None:
        self._followers = followers
        self._stood: _CellState | None = None
        self._is_same = False
        self._before: dict[str, Number] | None = None  # numbers, as the first pass was asked for

    def forget(self) -> None:
        """Begin a cell in which nothing is put back."""
        self._stood = self._before = None

    def begin(self, *, is_same: bool, has_numbers: bool = True) -> None:
        """Note how all stands.

        Args:
            is_same: The cell is run as it was: what it sets before its loops is set again.
            has_numbers: Numbers stand where the training does; a checkpoint has none.
        """
        followers = self._followers
        followers.look()
        self._is_same, self._before = is_same, None
        self._stood = _CellState(
            {name: _Object.of(one) for name, one in followers.living().items()},
            [(ref(one), name, options_of(one)) for one, name in followers.optimizers().items()],
            followers.numbers_now() if has_numbers else {},
            self._lists() if has_numbers else {},
            followers.counts_of_loops() if has_numbers else (),
            self._lost() if has_numbers else (),
        )

    def passed_over(self) -> None:
        """Note a pass that gives nothing, for it was done."""
        if self._stood is not None and self._before is None:
            self._before = self._followers.numbers_now()

    def put_back(self, *, is_in_midst: bool) -> PutBack:
        """Put all back, for the training continues here; in the midst of a loop or before one."""
        stood = self._stood
        if stood is None:
            return PutBack()
        self.passed_over()
        numbers, differs = self._put_numbers(stood.numbers)
        lists, shorter = self._put_lists(stood.lists)
        done, left = self._put_objects(stood.objects)  # lists of tensors are among these, too
        left += stood.lost
        every = done + _put_options(stood.options) + numbers + lists
        restarted = stood.counts if is_in_midst else ()
        return PutBack(tuple(every), tuple(left), tuple(differs + shorter), restarted)

    def _put_objects(self, stood: Mapping[str, _Object]) -> tuple[list[str], list[str]]:
        self._followers.look()
        done, left = [], []
        for name, one in self._followers.living().items():
            then = stood.get(name)
            if then is None or then.mark == mark(one):
                continue
            if then.number != id(one) and not self._is_same:
                continue  # the fixed cell makes another one
            if then.put_into(one):
                done.append(name)
            else:
                left.append(f"{name} ({type(one).__name__})")
        return done, left

    def _lists(self) -> dict[str, list[Any]]:
        """Return copies of lists, as long as they are to be."""
        numbers = self._followers.numbers_now()
        found = self._followers.lists_now()
        return {path: one[: int(numbers[f"len({path})"])] for path, one in found.items()}  # type: ignore[arg-type]

    def _lost(self) -> tuple[str, ...]:
        """Return the lists that have lost items: a rank was ahead, and has made another list."""
        numbers = self._followers.numbers_now()
        return tuple(
            f"{path} ({len(one)} of {numbers[f'len({path})']} items are left)"
            for path, one in self._followers.lists_now().items()
            if len(one) < numbers[f"len({path})"]  # type: ignore[operator]
        )

    def _put_numbers(
        self, stood: Mapping[str, Number]
    ) -> tuple[list[str], list[tuple[str, Number, Number]]]:
        now, moving = self._followers.numbers_now(), self._followers.moving_names()
        puts: dict[str, Number] = {}
        differs = []
        for name, was in stood.items():
            here = now.get(name, was)
            if here == was or is_option(name) or is_length(name):
                continue
            if not self._has_set(name, was):
                puts[name] = was
            elif name in moving:
                if self._is_same:
                    puts[name] = was
                else:
                    differs.append((name, was, here))
        self._followers.put_numbers(puts)
        return list(puts), differs

    def _has_set(self, name: str, was: Number) -> bool:
        """Return whether the cell has set a number before its first loop."""
        return (self._before or {}).get(name, was) != was

    def _put_lists(
        self, stood: Mapping[str, list[Any]]
    ) -> tuple[list[str], list[tuple[str, Number, Number]]]:
        done: list[str] = []
        differs: list[tuple[str, Number, Number]] = []
        for path, one in self._followers.lists_now().items():
            then, name = stood.get(path), f"len({path})"
            if then is None or _are_same(one, then):
                continue
            if self._has_set(name, len(then)) and not self._is_same:
                differs.append((name, len(then), len(one)))
            else:
                one[:] = then
                done.append(path)
        return done, differs


def _are_same(one: list[Any], other: list[Any]) -> bool:
    def is_same(a: Any, b: Any) -> bool:
        return a is b or (type(a) is type(b) and type(a) in _PLAIN and a == b)

    return len(one) == len(other) and all(map(is_same, one, other))


def _frozen(one: Any) -> bytes:
    """Return the state of an object; b"" of weights, and of what has none or cannot be copied."""
    if not has_state(one) or isinstance(one, nn.Module):
        return b""
    content = io.BytesIO()
    try:
        torch.save(one.state_dict(), content)
    except Exception:  # the user's class: it is named, should it move
        return b""
    return content.getvalue()


def _put_options(
    stood: Iterable[tuple["ref[torch.optim.Optimizer]", str, Options]],
) -> list[str]:
    """Give groups the options that they had; return whose were others."""
    done = []
    for where, name, options in stood:
        optimizer = where()
        if optimizer is None:
            continue
        now = options_of(optimizer)
        if len(now) == len(options) and now != options:
            put_options(optimizer, options)
            done.append(f"{name}'s options")
    return done


def _names(names: Iterable[str]) -> str:
    every = list(names)
    more = f" and {len(every) - _MOST_NAMES} more" if len(every) > _MOST_NAMES else ""
    return ", ".join(every[:_MOST_NAMES]) + more
