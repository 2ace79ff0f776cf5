"""Find what is alive at a cut of a forward: made before it, used behind it.

That is what one stage sends to the next. What follows from the inputs alone is made by every stage
for itself; what depends on weights, or is drawn at random, is a *value* here.

A stage gets a value at one of these places, and the model's own code between modules runs on it:

    argument   of the first block behind the cut, where no one else uses it, as of a chain of blocks
    output     of a module that an earlier stage runs
    argument   written in place, where others use it, too, and no module returned it: h + block(h)
    none       the stage makes it anew, of values that it gets: torch.cat of what modules returned
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

_KINDS = (tuple, list, dict, torch.Tensor)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor without its values."""

    shape: torch.Size
    dtype: torch.dtype

    def zeros(self, device: torch.device) -> torch.Tensor:
        """Return a tensor like it, with its own memory: a forward may write to it."""
        return torch.zeros(self.shape, dtype=self.dtype, device=device)

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.shape.numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Place:
    """One of the tensors that a call of a module returns.

    Attributes:
        module: The module's name.
        call: Number of the call, of those that are within no other module's.
        leaf: Number of the tensor in its output, by `leaves_of`.
    """

    module: str
    call: int
    leaf: int


@dataclass(frozen=True, slots=True)
class Crossing:
    """A value that a stage sends to the next.

    Attributes:
        spec: Its shape and dtype.
        places: Where modules return it; empty where it is an argument.
        argument: Position or name, in the call of the first block behind the cut.
        in_place: Whether others use that argument, too.
        since: The segment of the first weight or random number that it depends on.
    """

    spec: TensorSpec
    places: tuple[Place, ...] = ()
    argument: int | str | None = None
    in_place: bool = False
    since: int = 0


class CannotCutError(Exception):
    """What is alive at a cut cannot be sent; says why, in words.

    Attributes:
        entry: Number of the call of a block before which the cut is.
    """

    def __init__(self, why: str, entry: int) -> None:
        super().__init__(why)
        self.entry = entry


def leaves_of(tree: Any) -> tuple[list[Any], Any]:
    """Return the leaves of a module's output and its form; caches and other objects are leaves."""
    return tree_flatten(tree, is_leaf=lambda part: not isinstance(part, _KINDS))


@dataclass(eq=False, slots=True)
class _Value:
    """A tensor of a forward, from one change to the next."""

    tensor: torch.Tensor  # held, for an id may not be given to another one meanwhile
    made: int  # blocks that had been entered
    within: str  # which module's call; "" between them
    parents: tuple["_Value", ...]
    parameters: tuple[str, ...]
    is_random: bool
    reads: set[tuple[float, str]] = field(default_factory=set)  # blocks entered, within what
    last: float = -1  # of them
    places: list[tuple[int, Place]] = field(default_factory=list)
    changed: float = math.inf  # blocks that had been entered when it was written over
    since: int = 0  # when the first that it depends on was made

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.tensor.shape, self.tensor.dtype)

    def read(self, entered: float, within: str) -> None:
        self.reads.add((entered, within))
        self.last = max(self.last, entered)


class Values:
    """The values of a forward that is being traced, and which of them cross a cut.

    Attributes:
        entered: Blocks, in the order of their calls.
    """

    def __init__(self, kept: Iterable[torch.Tensor]) -> None:
        """Take the model's parameters and buffers: what they hold is no value."""
        self.entered: list[str] = []
        self._arguments: list[dict[int | str, _Value]] = []  # of each entry
        self._kept = {id(t) for t in kept}
        self._of: dict[int, _Value] = {}
        self._all: list[_Value] = []
        # Tensors that share memory, by the memory: both are held, for their ids' sake.
        self._sharing: dict[int, tuple[Any, list[torch.Tensor]]] = {}

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return id(tensor) in self._of

    def enter(self, block: str, given: Mapping[int | str, Any]) -> None:
        """Note that a block is called, with these arguments."""
        self.entered.append(block)
        found = {key: self._of.get(id(t)) for key, t in given.items()}
        self._arguments.append({key: value for key, value in found.items() if value is not None})

    def operate(
        self,
        func: Any,
        read: Sequence[torch.Tensor],
        made: Sequence[torch.Tensor],
        parameters: tuple[str, ...],
        within: str,
    ) -> None:
        """Note an operation: what it read and made, and which parameters it used."""
        now, name = len(self.entered), getattr(func, "overloadpacket", func).__name__
        is_random = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        # Of what they are called with, factories take the shape.
        takes = [] if name.startswith("new_") or name.endswith("_like") else read
        parents = tuple(self._of[id(t)] for t in takes if id(t) in self._of)
        for value in parents:
            value.read(now, within)
        for tensor in made:
            self._sharers(tensor)
        if not (parents or parameters or is_random):
            return
        given = {id(t) for t in read}
        for tensor in made:
            changed = self._sharers(tensor) if id(tensor) in given else [tensor]
            for one in changed:
                before = self._of.get(id(one))
                if before is not None:
                    before.changed = now
                if id(one) not in self._kept:
                    origins = parents if before is None else (*parents, before)
                    value = _Value(one, now, within, origins, parameters, is_random)
                    value.since = min([now, *(origin.since for origin in origins)])
                    self._of[id(one)] = value
                    self._all.append(value)

    def _sharers(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        memory = tensor.untyped_storage()
        _, sharing = self._sharing.setdefault(id(memory), (memory, []))
        if all(tensor is not one for one in sharing):
            sharing.append(tensor)
        return sharing

    def leave(self, module: str, call: int, output: Any) -> None:
        """Note what a call of a module returns."""
        for leaf, one in enumerate(leaves_of(output)[0]):
            if id(one) in self._of:
                place = len(self.entered), Place(module, call, leaf)
                self._of[id(one)].places.append(place)

    def end(self, output: Any) -> None:
        """Note the model's output: it is used behind all."""
        for leaf in leaves_of(output)[0]:
            is_record = dataclasses.is_dataclass(leaf) and not isinstance(leaf, torch.Tensor)
            for one in vars(leaf).values() if is_record else [leaf]:
                if id(one) in self._of:
                    self._of[id(one)].read(math.inf, "")

    def crossings(self, entries: Sequence[int]) -> dict[int, tuple[Crossing, ...]]:
        """Return what is sent at each of these cuts.

        Args:
            entries: Numbers of calls of blocks, in `entered`: before each is a cut.

        Raises:
            CannotCutError: Something that is alive at one of them cannot be sent.
        """
        found = {}
        later: list[_Value] = []  # what a stage sends must have come to it
        for entry in sorted(entries, reverse=True):
            taken = self._at(entry, later)
            found[entry] = tuple(
                dataclasses.replace(crossing, since=value.since)
                for value, crossing in taken.items()
            )
            later = [value for value, crossing in taken.items() if crossing.places]
        return found

    def _at(self, entry: int, later: Sequence[_Value]) -> dict[_Value, Crossing]:
        keys = {value: key for key, value in self._arguments[entry].items()}
        here = entry + 1, self.entered[entry]
        alive = [value for value in self._all if value.made <= entry < value.last]
        alone = {
            value
            for value in alive
            if value in keys and all(at <= entry or (at, by) == here for at, by in value.reads)
        }
        search = _Search(entry)
        for value in later:
            if any(at <= entry for at, _ in value.places):
                search.need(value, None)
        for value in alive:
            if value not in alone:
                search.need(value, keys.get(value))
        found = search.found
        found.update(
            {v: Crossing(v.spec, (), keys[v]) for v in alive if v in alone and v not in found}
        )
        if not found:
            raise CannotCutError("nothing that earlier stages make is used from there on", entry)
        odd = next((c.spec for c in found.values() if not c.spec.dtype.is_floating_point), None)
        if odd is not None:
            raise CannotCutError(
                f"a tensor of {odd.dtype} would be sent, which has no gradient", entry
            )
        return found


class _Search:
    """What must be sent at one cut so that every value that is alive there can be had."""

    def __init__(self, entry: int) -> None:
        self._entry = entry
        self.found: dict[_Value, Crossing] = {}
        self._made_anew: set[_Value] = set()

    def need(self, value: _Value, argument: int | str | None) -> None:
        """Have a value; `argument` is what the block behind the cut gets it as.

        Raises:
            CannotCutError: It cannot be had.
        """
        known = self.found.get(value)
        if known is not None and (known.places or argument is not None):
            return
        places = tuple(place for at, place in value.places if at <= self._entry)
        if places:
            if value.changed <= self._entry:
                raise self._cannot(f"what {places[-1].module} returns is changed in place")
            self.found[value] = Crossing(value.spec, places)
        elif argument is not None and not value.tensor._is_view():
            self.found[value] = Crossing(value.spec, (), argument, in_place=True)
        elif value not in self._made_anew:
            self._made_anew.add(value)
            self._make_anew(value)

    def _make_anew(self, value: _Value) -> None:
        if value.within:
            raise self._cannot(
                f"a tensor that {value.within} makes and does not return is used from there on"
            )
        if value.is_random:
            raise self._cannot("numbers drawn between the modules are used on both sides")
        if value.parameters:
            raise self._cannot(
                f"what the model makes of {value.parameters[0]} between modules is used from there "
                "on"
            )
        for parent in value.parents:
            self.need(parent, None)

    def _cannot(self, why: str) -> CannotCutError:
        return CannotCutError(why, self._entry)
