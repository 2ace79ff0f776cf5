"""Where two runs part, by what their ranks have written down of some steps.

A step is what `engine/checks/step_numerics` has seen, in the order of computation. Two tensors are
equal where their fingerprints are; else their sketches tell the distance. Round-off in the last
place is multiplied while it goes through a model: more than half of a dtype's digits it does not
take in a step, so the root of its epsilon is the limit, as for the losses of `layout.verify`.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from nbdist.client.metrics.numerics.distances import (
    Curve,
    Distance,
    around,
    first_beyond,
    shown,
    table,
)
from nbdist.shared.errors import UsageError
from nbdist.shared.text import counted, name_ranks

FORMAT: Final = 1
Entry = Sequence[Any]  # what; of which; shape and dtype; sketch, number or text
Steps = Mapping[int, Sequence[Entry]]

_EPSILON: Final = {"float64": 2.0**-52, "float16": 2.0**-10, "bfloat16": 2.0**-7}
_EPSILON_OF_OTHERS: Final = 2.0**-23
_WHY: Final = {
    "weight": "They begin the step with other weights: another seed, model or checkpoint, or a "
    "change between two steps.",
    "input": "The model is called with something else: other data, or another order of it.",
    "output": "What came before is equal: its code is another one, or what is done with its input, "
    "or it draws random numbers.",
    "buffer": "What modules return is equal: how they write their buffers is not.",
    "loss": "The model's outputs are equal: the loss function is another one, or its targets.",
    "gradient": "The loss is equal: the backward is another one, or what is done with gradients "
    "before the optimizer steps, such as clipping.",
    "options": "Gradients are equal: the optimizer is another one, or has other options.",
    "new weight": "Gradients and options are equal: the optimizer is another one, or has another "
    "state.",
}
# What must have been compared for such a sentence to be true.
_AFTER: Final = {
    "output": ("input",),
    "buffer": ("input", "output"),
    "loss": ("input", "output"),
    "gradient": ("input", "output", "loss"),
    "options": ("gradient",),
    "new weight": ("gradient", "options"),
}


@dataclass(frozen=True, slots=True)
class Recording:
    """What the ranks of a run have written down.

    Attributes:
        name: The run's.
        layout: "" where it had none.
        torch: The version of it.
        ranks: By rank, the steps by number.
    """

    name: str
    layout: str
    torch: str
    ranks: Mapping[int, Steps]


def read(name: str, layout: str, files: Mapping[int, Iterable[str]]) -> Recording:
    """Return a run's recording from the lines of its files, by rank.

    A last line that a killed rank has not ended is left out.

    Raises:
        UsageError: They are of another version of nbdist.
    """
    version, ranks = "", {}
    for rank, lines in files.items():
        steps: dict[int, Sequence[Entry]] = {}
        for line in lines:
            try:
                told = json.loads(line)
            except json.JSONDecodeError:
                break
            if told.get("format", FORMAT) != FORMAT:
                raise UsageError(
                    f"What run {name} has computed is written in format {told['format']}.",
                    why=f"this nbdist reads {FORMAT}",
                    do="run both again with %%distributed --keep",
                )
            version = told.get("torch", version)
            if "step" in told:
                steps[told["step"]] = told["entries"]
        ranks[rank] = steps
    return Recording(name, layout, version, ranks)


@dataclass(frozen=True, slots=True)
class RunDiff:
    """Two runs beside each other; print it to read it.

    Attributes:
        names: Theirs.
        versions: Of torch.
        ranks: How many have written.
        steps: Those that both have written down.
        distances: In the order of steps and of computation, of all ranks.
        random: The first step at whose beginning random numbers differ; None if at none.
        options: What options of the optimizer are, where they differ first, in words.
        last: The last step that each has written down.
    """

    names: tuple[str, str]
    versions: tuple[str, str]
    ranks: int
    steps: tuple[int, ...]
    distances: tuple[Distance, ...]
    random: int | None
    options: str
    last: tuple[int, int]

    @property
    def ok(self) -> bool:
        """Whether they are equal within round-off."""
        return first_beyond(self.distances) is None

    @property
    def curves(self) -> list[Curve]:
        """What a picture shows: of each place the rank that is furthest off."""
        furthest: dict[tuple[int, str, str], Distance] = {}
        for one in self.distances:
            key = (one.step, one.what, one.name)
            if one.what == "options" and not one.by:
                continue
            if key not in furthest or one.share > furthest[key].share:
                furthest[key] = one
        return [Curve(" and ".join(self.names), tuple(furthest.values()))]

    @property
    def sentences(self) -> list[str]:
        """What was found."""
        unequal = next((one for one in self.distances if one.by != 0), None)
        at = first_beyond(self.distances)
        if unequal is None:
            said = [f"equal bit for bit in all of the {counted(len(self.steps), 'step')}."]
        elif at is None:
            where = f"the first that differs is {unequal.place} at step {unequal.step}"
            said = [f"equal within round-off; {where}."]
        else:
            said = self._parts(self.distances[at], unequal)
        if self.random is not None and unequal is not None:
            said.append(f"Their random numbers differ from step {self.random} on.")
        if self.last[0] != self.last[1]:
            longer = self.last.index(max(self.last))
            said.append(f"{self.names[longer]} goes on until step {max(self.last)}.")
        if self.versions[0] != self.versions[1]:
            said.append(f"torch was {self.versions[0]} and {self.versions[1]}.")
        return said

    def _parts(self, first: Distance, unequal: Distance) -> list[str]:
        key = (first.step, first.what, first.name)
        ranks = [
            one.rank
            for one in self.distances
            if (one.step, one.what, one.name) == key and one.is_beyond
        ]
        before = max((step for step in self.steps if step < first.step), default=0)
        missing = counted(first.step - before - 1, "step")
        when = f"step {first.step}"
        when += f" ({missing} before it not recorded)" if before < first.step - 1 else ""
        if first.missing:
            how = first.missing
        elif first.what == "options":
            how = self.options
        elif math.isinf(first.by):
            how = "not finite in one of them, or in other places"
        else:
            how = f"off by {_percent(first.by)} of its size (round-off: {_percent(first.limit)})"
        is_first = (unequal.step, unequal.what, unequal.name) == key
        until = (
            "All before it is equal bit for bit."
            if is_first
            else f"All before it is within round-off, and bit for bit before {unequal.place} of "
            f"step {unequal.step}."
        )
        return [
            f"they part at {when}, on {name_ranks(ranks)}, at {first.place}: {how}.",
            until,
            self._why(first),
        ]

    def _why(self, first: Distance) -> str:
        """Return what may be the cause, by what was compared before."""
        if first.missing:
            return "Another model, another optimizer, or another loop."
        compared = {one.what for one in self.distances if one.step == first.step}
        lacking = [what for what in _AFTER.get(first.what, ()) if what not in compared]
        if lacking:
            unknown = " and ".join(f"{what}s".replace("losss", "losses") for what in lacking)
            return f"The {unknown} of this step are not recorded: the cause may lie there."
        return _WHY[first.what]

    def __str__(self) -> str:
        a, b = self.names
        recorded = f"{len(self.steps)} of steps {self.steps[0]}-{self.steps[-1]} are recorded"
        title = f"{a} and {b}, {counted(self.ranks, 'rank')}, {recorded}:"
        lines = [title, *(f"  {text}" for text in self.sentences)]
        at = first_beyond(self.distances)
        if at is not None:
            rank = self.distances[at].rank
            mine = [one for one in self.distances if one.rank == rank]
            where = mine.index(self.distances[at])
            rows = [
                [str(one.step), str(one.rank), one.what, one.name, shown(one)]
                for one in (mine[number] for number in around(len(mine), where))
            ]
            lines += table(["step", "rank", "what", "of", "distance of limit, relative"], rows)
        return "\n".join(lines)

    __repr__ = __str__


def compare(one: Recording, other: Recording) -> RunDiff:
    """Return the distances of two runs.

    Raises:
        UsageError: They have other layouts or ranks, or no step in common.
    """
    if one.layout != other.layout:
        a, b = (recording.layout or "none" for recording in (one, other))
        raise UsageError(
            f"{one.name} has the layout {a}, and {other.name} {b}.",
            why="runs are compared place by place, and each layout cuts batches and weights its "
            "own way",
            do=f'%dist diff "{a}" "{b}" compares layouts, on the ranks'
            if "none" not in (a, b)
            else "compare runs of one layout",
        )
    if one.ranks.keys() != other.ranks.keys():
        raise UsageError(
            f"{one.name} has written {counted(len(one.ranks), 'rank')} down, and {other.name} "
            f"{len(other.ranks)}.",
            why="runs are compared rank by rank",
            do="compare runs on as many ranks; %dist diff LAYOUT LAYOUT compares layouts",
        )
    every = [recording.ranks[rank].keys() for recording in (one, other) for rank in one.ranks]
    steps = sorted(set.intersection(*map(set, every)))
    if not steps:
        raise UsageError(
            f"{one.name} and {other.name} have written down no step in common.",
            why="a run writes with its optimizer's steps",
            do="train with %%distributed --keep in both",
        )
    found = [_StepDiff.of(step, one, other) for step in steps]
    return RunDiff(
        (one.name, other.name),
        (one.torch, other.torch),
        len(one.ranks),
        tuple(steps),
        tuple(distance for each in found for distance in each.distances),
        next((step for step, each in zip(steps, found, strict=True) if each.other_random), None),
        next((each.options for each in found if each.options), ""),
        (_last(one), _last(other)),
    )


@dataclass(frozen=True, slots=True)
class _StepDiff:
    """One step of two runs, on all ranks.

    Attributes:
        distances: In the order of computation.
        other_random: Whether a rank's random numbers are others as it begins.
        options: What options of the optimizer are, where they differ, in words.
    """

    distances: list[Distance]
    other_random: bool
    options: str

    @classmethod
    def of(cls, step: int, one: Recording, other: Recording) -> "_StepDiff":
        """Compare it."""
        sides = [
            {(e[0], e[1], rank): e for rank, steps in each.ranks.items() for e in steps[step]}
            for each in (one, other)
        ]
        sizes = _sizes(entry for side in sides for entry in side.values())
        distances, is_other, options = [], False, ""
        for key in _in_order([*sides[0], *sides[1]]):
            (what, name, rank), (a, b) = key, (side.get(key) for side in sides)
            if what == "random":
                is_other |= a is None or b is None or a[3] != b[3]
                continue
            missing = _missing(a, b, one.name, other.name)
            by, limit = _distance(a, b, sizes.get(what, 0.0))
            if what == "options" and by and not options and a is not None and b is not None:
                options = _changed(a[3], b[3])
            distances.append(Distance(what, name, step, rank, by, limit, missing))
        return cls(distances, is_other, options)


def _last(recording: Recording) -> int:
    return max(max(steps) for steps in recording.ranks.values())


def _in_order(keys: Sequence[tuple[str, str, int]]) -> list[tuple[str, str, int]]:
    """Return the keys of both sides in the order of computation, ranks beside each other."""
    places = {key[:2]: at for at, key in reversed(list(enumerate(keys)))}
    return sorted(
        dict.fromkeys(keys), key=lambda key: (_ORDER.index(key[0]), places[key[:2]], key[2])
    )


def _sizes(entries: Iterable[Entry]) -> dict[str, float]:
    """Return the largest norm of each kind of tensor."""
    sizes: dict[str, float] = {}
    for what, _, _, told in entries:
        if isinstance(told, list):
            sizes[what] = max(sizes.get(what, 0.0), _norm(told[:-1]))
    return sizes


def _missing(a: Entry | None, b: Entry | None, one: str, other: str) -> str:
    """Return why two cannot be compared, in words; "" where they can."""
    if a is None or b is None:
        return f"{one if b is None else other} alone has it"
    return f"{a[2]} and {b[2]}" if a[2] != b[2] else ""


def _distance(a: Entry | None, b: Entry | None, largest: float) -> tuple[float, float]:
    """Return the distance in units of the tensor's norm, and the limit of round-off."""
    if a is None or b is None or a[2] != b[2]:
        return math.inf, 0.0
    if a[0] == "options":
        return float(a[3] != b[3]), 0.0
    epsilon = _EPSILON.get(a[2].partition(" ")[0], _EPSILON_OF_OTHERS)
    root = math.sqrt(epsilon)
    if not isinstance(a[3], list):
        size = max(abs(a[3]), abs(b[3]))
        return abs(a[3] - b[3]) / size if a[3] != b[3] else 0.0, root
    if a[3][-1] == b[3][-1]:
        return 0.0, root
    size = max(_norm(a[3][:-1]), _norm(b[3][:-1]))
    by = _norm([x - y for x, y in zip(a[3][:-1], b[3][:-1], strict=True)])
    if math.isnan(by) or not size:
        return math.inf, root
    # What is nothing but round-off, as the gradient of a bias before batch norm, may be all other.
    return by / size, root * max(1.0, root * largest / size)


def _norm(sums: Iterable[float]) -> float:
    return math.sqrt(sum(one * one for one in sums))


def _changed(a: Mapping[str, str], b: Mapping[str, str]) -> str:
    names = [name for name in dict.fromkeys([*a, *b]) if a.get(name) != b.get(name)]
    return ", ".join(f"{name} {a.get(name, '-')} and {b.get(name, '-')}" for name in names)


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %"


_ORDER: Final = (
    *("weight", "random", "input", "output", "buffer", "loss", "gradient", "options"),
    "new weight",
)
