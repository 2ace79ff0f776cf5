"""The result of a proof: the distances of a layout from one process, and their limits. Pure.

Two right programs differ by round-off, for they add in another order. How much that is depends on
the model, so it is measured and not guessed: one process computes the same gradients in float64,
and three times more from weights moved by half a unit of their last place (in float64: four times).
The largest of the four distances is the tensor's *noise floor*. A layout may be `MULTIPLE` floors
away: it is another sample of the same noise. Real mistakes (a gradient scaled by 1.01, a sum left
out) are thousands of floors in float32.

Why four: the round-off of a parameter of one number, as a gain, is like a normal number, and 10
times the larger of two is exceeded by luck in 6 of 1000 cases, 10 times the largest of four in 1 of
10 000. Measured on 250 models with gains, products summed in two halves, 2250 such numbers: the
furthest was 10.0 floors away with two samples and 5.4 with four. Measured under tp and cp on models
without them (AMD EPYC; kernels for AVX-512, for AVX2 and for neither): 2.7 floors with two, 1.8
with four.

In low precision single numbers err by a fifth of the largest, where an activation falls on the
other side of zero, and norms by some hundredths. So norms are compared there, of what a rank has of
a gradient, and they may be `NORM_MULTIPLE` floors away: they hardly differ by luck.
"""

import math
import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from nbdist.shared.errors import LayoutError
from nbdist.shared.text import counted, name_ranks

MULTIPLE = 10
NORM_MULTIPLE = 5
FEW = 16  # elements, of which a norm is as much luck as the largest
_SHOWN = 4  # tensors in a proof's text
_WIDTH = 100  # of its lines


@dataclass(frozen=True, slots=True)
class Noise:
    """The round-off of one tensor.

    Attributes:
        floor: The largest distance of two right results, or the norm of all distances.
        scale: The largest value, or the norm.
    """

    floor: float
    scale: float


@dataclass(frozen=True, slots=True)
class Difference:
    """The distance of one tensor of one rank from one process.

    Attributes:
        what: "output" (of a module), "gradient", "update" (of a weight, by an optimizer), "weight",
            "buffer", "loss" or "dropout" (the probability of a module).
        name: Of the parameter or buffer, in the plain model.
        step: From 1; 0 is before the first.
        rank: Whose.
        by: The largest distance, or the norm of all; nan where a result is nan, infinite where
            it is missing, or of another shape.
        floor: The noise floor.
        allowed: Its limit.
    """

    what: str
    name: str
    step: int
    rank: int
    by: float
    floor: float
    allowed: float

    @property
    def is_allowed(self) -> bool:
        """Whether it may be round-off."""
        return self.by <= self.allowed

    @property
    def share(self) -> float:
        """The distance in units of what is allowed; infinite where a result is not a number."""
        if self.by == 0:
            return 0.0
        share = self.by / self.allowed if self.allowed else math.inf
        return math.inf if math.isnan(share) else share

    def __str__(self) -> str:
        when = f"at step {self.step}" if self.step else "before the first step"
        whose = f"the {self.what} of {self.name}" if self.name else f"the {self.what}"
        if math.isinf(self.by):
            return f"{whose} {when}, missing or of another shape"
        return f"{whose} {when} by {self.by:.1e} (allowed {self.allowed:.1e})"


@dataclass(frozen=True, slots=True)
class OnePiece:
    """The loss of a batch in one piece, beside the mean of the pieces that the layout makes of it.

    Attributes:
        tried: Pieces that were computed in one: the first, micro-batches or ranks' shares.
        count: Pieces of the batch.
        loss: Of those in one.
        mean: Of their own losses, weighted by samples.
        allowed: The limit of their difference.
        failed: Why they cannot be computed in one; "" where they can.
    """

    tried: int
    count: int
    loss: float = math.nan
    mean: float = math.nan
    allowed: float = 0.0
    failed: str = ""

    @property
    def is_mean(self) -> bool:
        """Whether the cut of the batch makes no difference to the loss."""
        return abs(self.loss - self.mean) <= self.allowed

    @property
    def verdict(self) -> str:
        """The limit of a proof on pieces, in a clause."""
        if self.failed:
            return "not compared with the batch in one piece"
        return f"in one piece the batch has another loss, {self.loss:.6g} and not {self.mean:.6g}"

    @property
    def note(self) -> str:
        """Both numbers, why, and what to do."""
        if self.failed:
            return f"The batch could not be computed in one piece ({self.failed})."
        whole = "the batch" if self.tried == self.count else f"{self.tried} of {self.count} pieces"
        return (
            f"The loss of {whole} in one piece is {self.loss:.6g}; the mean of the {self.tried} "
            f"pieces' losses, which is trained, is {self.mean:.6g}. The loss divides by a count "
            "that differs between pieces, as with a mask or ignore_index, or compares samples. For "
            "a mean over a mask, give layout.step what it keeps: weight=(y != -100)."
        )


@dataclass(frozen=True, slots=True)
class Proof:
    """The result of `layout.verify`; print it to read it.

    Attributes:
        layout: The layout's name.
        steps: Shadow steps that were made.
        is_bit_equal: Whether every gradient, buffer and loss of every rank is the same to the bit.
        worst: Of each tensor the difference that is nearest to what is allowed, or furthest beyond.
        losses: For each step the mean over the split, of the layout and of one process.
        first: The first difference that is not allowed; None if there is none.
        ranks: Those that have it.
        notes: Further remarks for the reader.
        terms: Under which both computed, such as "in bf16".
        unreached: Parameters that are trained, and of which this loss makes no gradient.
        one_piece: The batch in one piece, where its loss is another or could not be computed.
    """

    layout: str
    steps: int
    is_bit_equal: bool
    worst: tuple[Difference, ...]
    losses: tuple[tuple[float, float], ...]
    first: Difference | None
    ranks: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    terms: tuple[str, ...] = ()
    unreached: tuple[str, ...] = ()
    one_piece: OnePiece | None = None

    @property
    def ok(self) -> bool:
        """Whether the layout computes what one process does on the same split."""
        return self.first is None

    @property
    def verdict(self) -> str:
        """The result in a sentence."""
        terms = "".join(f", {term}" for term in self.terms)
        over = f"over {counted(self.steps, 'step')}{terms}"
        if self.first is not None:
            return f"DIFFERS: {self.first} on {name_ranks(self.ranks)}{terms}"
        over += f"; {self.one_piece.verdict}" if self.one_piece is not None else ""
        if self.is_bit_equal:
            return f"equal bit for bit {over}"
        worst = self.worst[0]
        return (
            f"equal within round-off {over}. Closest call: the {worst.what} of "
            f"{worst.name or 'the batch'} differs by {worst.by:.1e} (round-off alone "
            f"{worst.floor:.1e}, limit {worst.allowed:.1e})"
        )

    def __repr__(self) -> str:
        lines = [f"{self.layout} against one process on the same split: {self.verdict}"]
        shown = [d for d in self.worst[:_SHOWN] if d.by > 0 or not d.is_allowed]
        if shown:
            width = max(len(d.name or d.what) for d in shown)
            lines.append(
                f"  {'tensor':<{width}}  {'what':<8}  step  rank  difference  noise floor  allowed"
            )
        lines += [
            f"  {d.name or d.what:<{width}}  {d.what:<8}  {d.step:>4}  {d.rank:>4}  "
            f"{'missing' if math.isinf(d.by) else format(d.by, '.1e'):>10}  "
            f"{d.floor:>11.1e}  {d.allowed:>7.1e}"
            for d in shown
        ]
        if self.losses:
            live, alone = zip(*self.losses, strict=True)
            width = max(len(self.layout), len("one process"))
            for whose, losses in ((self.layout, live), ("one process", alone)):
                numbers = "".join(f"  {loss:<9.6g}" for loss in losses)
                lines.append(f"  loss, {whose:<{width}}{numbers}".rstrip())
        notes = [*([] if self.one_piece is None else [self.one_piece.note]), *self.notes]
        if self.unreached:
            notes.insert(0, f"{some_of(self.unreached)} was not compared: it gets no gradient.")
        return "\n".join([*lines, *map(in_lines, notes)])

    def raise_if_different(self) -> None:
        """Raise where the layout does not compute what one process does.

        Raises:
            LayoutError: It differs; the text says where first.
        """
        if self.first is not None:
            raise LayoutError(
                f'Layout "{self.layout}" does not compute what one process does: {self.first}.',
                why="something between model, layout and loop changes what is trained",
                do="print the report for the tensors that differ most",
            )


@dataclass(frozen=True, slots=True)
class Looked:
    """A proof of one step with what every module returns.

    Attributes:
        proof: Its `worst` has outputs, too.
        outputs: Their names, in the order in which modules end in one process.
        backward: Names of trained parameters, the last of the model first.
        parts: Outputs of which a rank has a part alone, which is not compared.
        unkept: How many outputs there were beyond the bound of what is kept.
        beyond: By rank, what is further off there than allowed, by kind and name.
    """

    proof: Proof
    outputs: tuple[str, ...]
    backward: tuple[str, ...]
    parts: tuple[str, ...]
    unkept: int
    beyond: tuple[frozenset[tuple[str, str]], ...]


def in_lines(note: str) -> str:
    """Return a note as people read it under a proof: JupyterLab breaks long lines within words."""
    return textwrap.fill(
        note, _WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
    )


def some_of(names: Sequence[str]) -> str:
    """Return names in few words: the first, and how many more there are."""
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]


def allowances(noise: Mapping[str, Noise], smallest: float) -> dict[str, float]:
    """Return the limit of each tensor's distance from one process.

    A floor can be small by luck, of a tensor of few elements; so none counts for less than the
    usual one, relative to its values.

    Args:
        noise: By tensor.
        smallest: The smallest relative error that counts: the dtype's epsilon.
    """
    relative = [n.floor / n.scale for n in noise.values() if n.scale > 0 and n.floor < n.scale]
    usual = max(smallest, statistics.median(relative)) if relative else smallest
    return {name: MULTIPLE * max(n.floor, usual * n.scale) for name, n in noise.items()}


def norm_allowances(
    noise: Mapping[str, Noise], sizes: Mapping[str, int], smallest: float
) -> dict[str, float]:
    """Return the limits of norms' distances from one process, in low precision.

    Args:
        noise: By tensor, as norms.
        sizes: Elements.
        smallest: As for `allowances`.
    """
    few = {name for name, size in sizes.items() if size < FEW}
    return {
        name: allowed if name in few else allowed / MULTIPLE * NORM_MULTIPLE
        for name, allowed in allowances(noise, smallest).items()
    }


class LossSpread(Enum):
    """The kinds of distances between one process's losses.

    ROUND_OFF: Those of two orders of adding.
    DRIFT: More, though the same weights give the same losses: round-off has grown.
    CHANCE: The same weights give other losses each time.
    """

    ROUND_OFF = auto()
    DRIFT = auto()
    CHANCE = auto()


def spread_of(losses: Iterable[Noise], epsilon: float) -> LossSpread:
    """Return the kind of the losses' distances; DRIFT may be CHANCE."""
    is_small = all(noise.floor <= math.sqrt(epsilon) * noise.scale for noise in losses)
    return LossSpread.ROUND_OFF if is_small else LossSpread.DRIFT


def judge(
    layout: str,
    steps: int,
    found: Iterable[Difference],
    losses: Iterable[tuple[float, float]],
    notes: Iterable[str],
    terms: Iterable[str] = (),
    unreached: Iterable[str] = (),
    one_piece: OnePiece | None = None,
    *,
    is_bit_equal: bool,
) -> Proof:
    """Return the proof from the findings of all ranks."""
    everything = sorted(found, key=lambda d: -d.share)
    wrong = [d for d in everything if not d.is_allowed]
    first = min(wrong, key=lambda d: (d.step, -d.share), default=None)
    ranks = {d.rank for d in wrong if first is not None and _key(d) == _key(first)}
    worst: dict[tuple[str, str], Difference] = {}
    for difference in ([] if first is None else [first]) + everything:
        worst.setdefault(_key(difference), difference)
    return Proof(
        layout,
        steps,
        is_bit_equal,
        tuple(worst.values()),
        tuple(losses),
        first,
        tuple(sorted(ranks)),
        tuple(notes),
        tuple(terms),
        tuple(unreached),
        one_piece,
    )


def _key(difference: Difference) -> tuple[str, str]:
    return difference.what, difference.name
