"""Read a layout's text, `"dp=2 fsdp=-1"` or `"zero3"`, into the sizes of a mesh.

Pure: no torch, no process group. The number of ranks is an argument.

`"zero1"` is `dp` whose optimizer states are cut over the replicas. `"hsdp"` is `dp` beside `fsdp`:
a number beside it (`"hsdp dp=4"`, `"hsdp fsdp=8"`) leaves the rest to the other axis. Without one,
shards are inside a host and replicas between hosts, so that only gradients cross the slow network;
on one host there are 2 replicas.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from nbdist.engine.layout.plan.axis_facts import AXES, FACTS
from nbdist.engine.layout.plan.misfit import (
    Misfit,
    fill_ins,
    no_hsdp,
    of_hsdp_sized,
    of_name,
    replaced,
    unknown,
)

# A name is an axis that takes the rest of the ranks, unless a number is given beside it.
NAMES = {"ddp": "dp", "zero1": "dp", "fsdp": "fsdp", "zero2": "fsdp", "zero3": "fsdp"}
HSDP = "hsdp"  # a name for two axes


def words() -> list[str]:
    """Return what a layout may be written of, for Tab."""
    return [*(name for name in NAMES if name not in AXES), HSDP, *(f"{axis}=" for axis in AXES)]


@dataclass(frozen=True, slots=True)
class MeshShape:
    """Sizes of the axes, outermost first; their product is the number of ranks.

    `reshard_after_forward` concerns `fsdp` only: True gives the gathered parameters back after
    forward (ZeRO-3), False keeps them until backward has used them (ZeRO-2's traffic).
    `shards_states` concerns only `dp`: replicas share the optimizer's states (ZeRO-1).
    `idle` are the names that were asked for and have one rank, so that they do nothing.
    """

    pp: int = 1
    dp: int = 1
    fsdp: int = 1
    ep: int = 1
    cp: int = 1
    tp: int = 1
    reshard_after_forward: bool = True
    shards_states: bool = False
    idle: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        for axis, size in self.sizes.items():
            if size < 1:
                raise ValueError(f"axis {axis} has size {size}; sizes begin at 1")
        if self.shards_states and set(self.axes) != {"dp"}:
            raise ValueError(f"zero1 goes with dp alone, and the axes are {self.axes}")

    @property
    def sizes(self) -> dict[str, int]:
        """Every axis with its size, outermost first."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def axes(self) -> dict[str, int]:
        """The axes that a DeviceMesh needs: those larger than 1, or `dp` on a single rank."""
        return {axis: size for axis, size in self.sizes.items() if size > 1} or {"dp": 1}

    @property
    def gathers_twice(self) -> bool:
        """Whether fsdp gathers blocks for backward again; a pipeline keeps them for its step."""
        return self.reshard_after_forward and self.pp == 1

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(self.sizes.values())

    @property
    def averaged(self) -> list[str]:
        """The axes that gradients are averaged over: dp or fsdp, if there are any, first."""
        return [axis for axis, size in self.sizes.items() if size > 1 and FACTS[axis].averages]

    @property
    def apart(self) -> list[str]:
        """The axes whose ranks see other samples, or other parts of them."""
        facts = {axis: FACTS[axis] for axis, size in self.sizes.items() if size > 1}
        return [axis for axis, its in facts.items() if its.averages or its.shares_batch]

    @property
    def shards(self) -> int:
        """The number of ranks over which parameters are cut: fsdp's, with those of cp."""
        return self._averaging // self.dp if self.fsdp > 1 else 1

    @property
    def replicas(self) -> int:
        """The number of such sets of ranks; without fsdp those of cp count here."""
        return self._averaging // self.shards

    @property
    def _averaging(self) -> int:
        return math.prod(self.sizes[axis] for axis in self.averaged)

    @property
    def is_cut(self) -> bool:
        """Whether a rank holds a part of the parameters."""
        return any(FACTS[axis].cuts_model for axis in self.axes)

    @property
    def changes_forward(self) -> bool:
        """Whether blocks run otherwise than they are written."""
        return any(FACTS[axis].changes_forward for axis in self.axes)

    @property
    def same_samples(self) -> int:
        """The number of neighbours with the same samples and random numbers."""
        return math.prod(size for axis, size in self.sizes.items() if FACTS[axis].draws_same)

    def data_part(self, rank: int) -> tuple[int, int]:
        """Return (index, count): a rank's part of every batch.

        `dp`, `fsdp` and `ep` share a batch; ranks that differ in another axis alone have the same.
        """
        part, count = 0, 1
        for axis, size in reversed(self.sizes.items()):
            if FACTS[axis].shares_batch:
                part, count = part + rank % size * count, count * size
            rank //= size
        return part, count

    @property
    def name(self) -> str:
        """The canonical text: a name people know where there is one, else the mesh string."""
        sharded = "zero3" if self.reshard_after_forward else "zero2"
        match list(self.axes):
            case ["dp"]:
                return "zero1" if self.shards_states else "ddp"
            case ["fsdp"]:
                return sharded
        words = [f"{axis}={size}" for axis, size in self.axes.items()]
        return " ".join([*words, "zero2"] if self.fsdp > 1 and sharded == "zero2" else words)


def parse(text: str, world_size: int, ranks_on_host: int | None = None) -> MeshShape:
    """Return the mesh that `text` asks for on `world_size` ranks.

    Args:
        text: Words `axis=N`, with `-1` for "the rest" once, and names; `"ddp"` alone is
            `"dp=-1"`, `"zero3"` and `"fsdp"` are `"fsdp=-1"`, `"zero2"` is that without
            giving parameters back between forward and backward.
        world_size: Number of ranks of the group.
        ranks_on_host: How many of them each host has; None is one host. For `"hsdp"`.

    Raises:
        LayoutError: An unknown or repeated word, a size that is no number, or a product that
            is not `world_size`; the text names what would work.
    """
    try:
        return _shape(text, world_size, ranks_on_host)
    except Misfit as misfit:
        raise misfit.error(lambda other: fits(other, world_size, ranks_on_host)) from None


def fits(text: str, world_size: int, ranks_on_host: int | None = None) -> bool:
    """Return whether `parse` would not refuse it."""
    try:
        _shape(text, world_size, ranks_on_host)
    except Misfit:
        return False
    return True


def ranks_needed(text: str) -> int | None:
    """Return the one number of ranks that a layout can have; None where several fit, or none."""
    sizes = re.findall(r"=\s*(\d+)", str(text))
    needed = math.prod(map(int, sizes))
    is_only_one = bool(sizes) and fits(text, needed) and not fits(text, 2 * needed)
    return needed if is_only_one else None


def _shape(text: str, world_size: int, ranks_on_host: int | None) -> MeshShape:
    if not isinstance(text, str):
        raise Misfit(
            f"A layout is a string, not {text!r}.", do='give one, such as "ddp" or "fsdp=-1"'
        )
    words = [word for word in re.split(r"[\s,]+", re.sub(r"\s*=\s*", "=", text.lower())) if word]
    if not words:
        raise Misfit("The layout is empty.", do='give one, such as "ddp" or "fsdp=-1"')
    sizes: dict[str, int] = {}
    named: list[str] = []
    for word in words:
        axis, equals, number = word.partition("=")
        if not equals:
            named.append(_known_name(word, words))
        elif _known_axis(axis, number, words, world_size) in sizes:
            raise Misfit(f'Axis {axis} is given twice in "{text}".', do="keep one of the two")
        else:
            sizes[axis] = _size(axis, number)
    if {"zero2", "zero3"} <= set(named):
        raise Misfit(f'"{text}" asks for zero2 and zero3 at once.', do="keep one of the two")
    if HSDP in named:
        sizes = _hsdp(text, sizes, world_size, ranks_on_host or world_size)
    for name in named:
        if name != HSDP:
            sizes.setdefault(NAMES[name], -1)
    filled = _fill(sizes, named, world_size)
    if "zero1" in named:
        _refuse_beside_zero1(text, named, filled)
    if HSDP in named and min(filled["dp"], filled["fsdp"]) < 2:
        others = {a: size for a, size in filled.items() if a not in ("dp", "fsdp") and size > 1}
        raise no_hsdp(text, others, world_size)
    idle = [name for name in named if name != HSDP and filled[NAMES[name]] == 1 < world_size]
    return MeshShape(
        **filled,
        reshard_after_forward="zero2" not in named,
        shards_states="zero1" in named,
        idle=tuple(idle),
    )


def _hsdp(text: str, sizes: dict[str, int], world_size: int, ranks_on_host: int) -> dict[str, int]:
    """Return `sizes` with those of dp and fsdp, one of them open; see the module's text."""
    if {"dp", "fsdp"} & set(sizes):
        return {**dict.fromkeys(("dp", "fsdp"), -1), **sizes}
    if -1 in sizes.values():
        raise Misfit(
            f'"{text}" leaves the rest of the ranks to two axes.',
            why="hsdp takes what the numbers beside it leave",
            do="give the other axis a number",
        )
    if ranks_on_host == world_size:
        shards, odd = divmod(world_size, 2 * math.prod(sizes.values()))
    else:
        inner = AXES[AXES.index("fsdp") + 1 :]
        shards, odd = divmod(ranks_on_host, math.prod(sizes.get(axis, 1) for axis in inner))
        odd = odd or world_size % ranks_on_host
    if odd or shards < 2:
        raise no_hsdp(text, sizes, world_size)
    return {**sizes, "dp": -1, "fsdp": shards}


def _refuse_beside_zero1(text: str, named: list[str], sizes: dict[str, int]) -> None:
    """Refuse axes beside dp where its replicas share the optimizer's states.

    Raises:
        Misfit: There are such; torch's ZeroRedundancyOptimizer takes whole parameters.
    """
    others = [axis for axis, size in sizes.items() if axis != "dp" and size > 1]
    if not others and not {"ddp", "fsdp", "zero2", "zero3", HSDP} & set(named):
        return
    beside = [axis for axis in others if axis != "fsdp"]
    instead = " ".join(["fsdp=-1", *(f"{axis}={sizes[axis]}" for axis in beside), "zero2"])
    raise Misfit(
        f'"{text}": zero1 goes with dp alone.',
        why="it cuts the optimizer's states over replicas that hold whole parameters",
        tries=[f'"{instead}" cuts states, gradients and parameters'] if others else [],
        do='write "zero1"',
    )


def _known_name(word: str, words: Sequence[str]) -> str:
    if word in NAMES or word == HSDP:
        return word
    if word in AXES:
        raise Misfit(
            f'Axis {word} needs a size in "{word}".',
            tries=[f'"{replaced(words, word, f"{word}=-1")}" takes the rest'],
            do=f'"{word}=-1" takes the rest',
        )
    raise unknown(word, words, [*AXES, *NAMES, HSDP])


def _known_axis(axis: str, number: str, words: Sequence[str], world_size: int) -> str:
    if axis in AXES:
        return axis
    if axis in NAMES:
        raise Misfit(
            f'"{axis}" is a name and takes no size; "{axis}={number}" gives it one.',
            tries=of_name(words, axis, NAMES[axis], number),
        )
    if axis == HSDP:
        raise Misfit(
            f'"hsdp" is a name for two axes; "hsdp={number}" gives it one size.',
            tries=of_hsdp_sized(number, world_size),
        )
    raise unknown(axis, words, [*AXES, *NAMES, HSDP])


def _size(axis: str, number: str) -> int:
    try:
        size = int(number)
    except ValueError:
        size = 0
    if size < 1 and size != -1:
        raise Misfit(
            f'"{axis}={number}" is not a size.', why="a size is 1 or more, or -1 for the rest"
        )
    return size


def _fill(sizes: dict[str, int], names: Sequence[str], world_size: int) -> dict[str, int]:
    """Return `sizes` with -1 replaced, checked against the number of ranks."""
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    fixed = math.prod(size for size in sizes.values() if size != -1)
    shown = " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size != -1)
    if len(open_axes) > 1:
        raise Misfit(
            f"Axes {' and '.join(open_axes)} both take the rest of the ranks.",
            do=f"give {open_axes[0]} a number",
        )
    if open_axes:
        if world_size % fixed:
            raise Misfit(
                f"{shown} does not divide the {world_size} ranks.",
                why=f"{open_axes[0]}=-1 takes what is left, and {world_size} / {fixed} is no "
                "whole number",
                do=f"use a divisor of {world_size}: {_divisors(world_size)}",
            )
        return {**sizes, open_axes[0]: world_size // fixed}
    if fixed != world_size:
        plural, are = "rank" if fixed == 1 else "ranks", "is" if world_size == 1 else "are"
        raise Misfit(
            f"{shown} needs {fixed} {plural}, and there {are} {world_size}.",
            why="the product of all degrees must equal the world size",
            tries=fill_ins(sizes, names, world_size),
            do=f'leave one axis to nbdist, as "dp=-1", and use divisors of {world_size} for the '
            "others",
        )
    return sizes


def _divisors(n: int) -> str:
    return ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)
