"""Stages of a pipeline as plain values: which blocks each has, on which rank, by which balance.

    schedule        stages a rank   stages of rank r, of p
    gpipe, 1f1b     1               r
    interleaved     2               r, r + p
    zero-bubble     2               r, r + p
    zbv             2               r, 2p - 1 - r

Pure: counts and names, no model. Sources: Huang et al., "GPipe", 2019; Narayanan et al.,
"Efficient Large-Scale Language Model Training", 2021, section 2.2; Qi et al., "Zero Bubble Pipeline
Parallelism", 2023.
"""

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from nbdist.engine.layout.policies.policies import Pipeline
from nbdist.shared.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Stage:
    """A run of blocks, with the modules before the first one and after the last one of all.

    Attributes:
        index: Of the stage, in the order of the data.
        rank: Its place on the axis pp.
        first: Number of its first block.
        end: Number of the block after its last one.
        blocks: Names of its blocks.
        parameters: Names of what it trains or keeps.
        numbers: How many numbers these hold.
        share: Its part of what was balanced, from 0 to 1.
    """

    index: int
    rank: int
    first: int
    end: int
    blocks: tuple[str, ...]
    parameters: tuple[str, ...]
    numbers: int
    share: float


def per_rank(schedule: str) -> int:
    """Return the number of stages of a rank."""
    return 1 if schedule in ("gpipe", "1f1b") else 2


def makes_halves(schedule: str) -> bool:
    """Return whether a schedule makes backwards in halves: for inputs, then for weights."""
    return schedule in ("zero-bubble", "zbv")


def rank_of(stage: int, schedule: str, pp: int) -> int:
    """Return the place on the axis pp of the rank that has a stage."""
    return 2 * pp - 1 - stage if schedule == "zbv" and stage >= pp else stage % pp


def bubble(schedule: str, pp: int, microbatches: int) -> float:
    """Return the part of a step in which a rank waits, where every block takes the same time.

    A backward counts as two forwards, half of it for the weights, which zero-bubble schedules put
    where a rank would wait.
    """
    work = microbatches * per_rank(schedule)
    if schedule == "zbv":
        return 0.0
    if schedule == "zero-bubble":
        work *= 3
    return (pp - 1) / (work + pp - 1)


USUAL = 8  # micro-batches, where no number is asked for: a rank of two waits a ninth of a step


def check_microbatches(policy: Pipeline, pp: int) -> None:
    """Refuse a number of micro-batches that the schedule cannot order.

    Raises:
        LayoutError: With the nearest number that works.
    """
    wanted = policy.microbatches
    if wanted is None or _is_orderly(policy.schedule, pp, wanted):
        return
    near = sorted(range(1, 2 * (wanted + pp)), key=lambda n: _far(n, wanted))
    works = next(n for n in near if _is_orderly(policy.schedule, pp, n))
    raise LayoutError(
        f'{wanted} micro-batches do not go through {pp} ranks by "{policy.schedule}".',
        why="it needs one a rank at least"
        if wanted < pp
        else "it works in rounds of as many micro-batches, one or more a rank",
        do=f"Pipeline(microbatches={works}) is the nearest that works, with a rank's share of "
        "samples that is a multiple of it",
    )


def _far(count: int, wanted: int) -> tuple[int, int]:
    return abs(count - wanted), -count


def _is_orderly(schedule: str, pp: int, microbatches: int) -> bool:
    if schedule == "gpipe":
        return True
    if schedule == "zbv":
        return microbatches >= 2 * pp - 1
    in_rounds = microbatches % max(1, microbatches // pp) == 0
    return microbatches >= pp and (schedule == "1f1b" or in_rounds)


def forward_microbatches(pp: int, wanted: int | None, samples: int) -> int:
    """Return the number of equal parts of a batch without a backward: any batch can be cut."""
    most = USUAL if wanted is None else wanted
    return next(
        n
        for n in range(max(1, min(most, samples)), 0, -1)
        if samples % n == 0 and n % max(1, n // pp) == 0
    )


def count_for(samples: int, policy: Pipeline, pp: int, before: int = 0, least: int = 1) -> int:
    """Return the number of equal micro-batches of a batch.

    Args:
        samples: A rank's share.
        policy: The schedule, and how many micro-batches; None takes what the share allows.
        pp: Ranks of a pipeline.
        before: The largest share that a step has taken; 0 before the first.
        least: Samples that a micro-batch needs: batch norm has no statistics of one.

    Raises:
        LayoutError: It cannot be cut so; with the nearest numbers that work.
    """
    wanted = policy.microbatches
    if wanted is not None and samples and samples % wanted == 0:
        return wanted
    # What works for a smaller batch must work for those before it, too.
    shares = samples if wanted is None else math.gcd(samples, before)
    fits = [
        n
        for n in range(1 if policy.schedule == "gpipe" else 2, shares // least + 1)
        if shares % n == 0 and _is_orderly(policy.schedule, pp, n)
    ]
    near = min(fits, key=lambda n: _far(n, USUAL if wanted is None else wanted), default=0)
    if wanted is None:
        if near:
            return near
        count = next(n for n in itertools.count(1) if _is_orderly(policy.schedule, pp, n))
        at_least = f" of {least} samples, which batch norm needs," if least > 1 else ""
        raise LayoutError(
            f"A share of {samples} samples is too few for a pipeline of {pp} ranks.",
            why=f'"{policy.schedule}" needs {count} equal micro-batches{at_least} or more',
            do=f"give {count * least} samples or a multiple of it; loaders drop a smaller last "
            "batch with drop_last=True",
        )
    other = f", or Pipeline(microbatches={near})" if near > 1 else ""
    below, above = samples // wanted * wanted, -(-samples // wanted) * wanted
    sizes = " or ".join(str(n) for n in dict.fromkeys((below, above)) if n)
    raise LayoutError(
        f"A share of {samples} samples cannot be cut into {wanted} equal micro-batches.",
        why="every micro-batch goes through the same buffers, and counts the same",
        do=f"leave a smaller last batch out, with drop_last=True in the loader: shares of {before} "
        f"went before{other}"
        if samples < before
        else f"give {sizes} samples{other}; loaders drop a smaller last batch with drop_last=True",
    )


def first_blocks(
    policy: Pipeline,
    pp: int,
    blocks: Sequence[str],
    costs: Sequence[float],
    cannot: Mapping[int, str] = MappingProxyType({}),
) -> list[int]:
    """Return the number of the first block of each stage.

    Args:
        policy: Its `split` may name them.
        pp: Ranks of a pipeline.
        blocks: Names, in the order of the data.
        costs: The cost of each, with the modules before the first and after the last.
        cannot: Why no stage may begin with a block, by its number.

    Raises:
        LayoutError: More stages than blocks that may begin one, or names that are none or in
            another order.
    """
    count = per_rank(policy.schedule) * pp
    if len(blocks) < count:
        fits = len(blocks) // per_rank(policy.schedule)
        raise LayoutError(
            f'pp={pp} by "{policy.schedule}" makes {count} stages of {len(blocks)} blocks.',
            why="every stage needs a block",
            do=f"pp={fits} is the largest that works"
            if fits > 1
            else 'Pipeline("1f1b") makes one stage a rank; "zero3" cuts any model',
        )
    if policy.split is None or isinstance(policy.split, str):
        if len(blocks) - len(cannot) < count:
            refuse_cut(blocks, cannot)
        return balanced(costs, count, cannot)
    numbers = [_number(entry, blocks) for entry in policy.split]
    refuse_cut(blocks, {n: why for n, why in cannot.items() if n in numbers})
    if len(numbers) != count or numbers[0] != 0 or sorted(set(numbers)) != numbers:
        shown = balanced(costs, count, cannot if len(blocks) - len(cannot) >= count else {})
        raise LayoutError(
            f"split names {len(numbers)} first blocks, and there are {count} stages."
            if len(numbers) != count
            else "split must begin with the first block and continue in the order of the data.",
            do=f"by size it would be split={[blocks[n] for n in shown]}",
        )
    return numbers


def refuse_cut(blocks: Sequence[str], cannot: Mapping[int, str]) -> None:
    """Refuse the first of these cuts, if there is one.

    Raises:
        LayoutError: With why what is alive there cannot be sent.
    """
    for number, why in cannot.items():
        raise LayoutError(
            f"No stage can begin with {blocks[number]}.",
            why=why,
            do="return that tensor from a module, which it is sent from, or cut at other blocks by "
            'Pipeline(split=[...]); "zero3" cuts any model',
        )


def _number(entry: object, blocks: Sequence[str]) -> int:
    if entry in blocks:
        return list(blocks).index(str(entry))
    if isinstance(entry, int) and 0 <= entry < len(blocks):
        return entry
    raise LayoutError(
        f"split names {entry!r}, which is not a block.",
        do=f"blocks are {blocks[0]} ... {blocks[-1]}, or numbers from 0 to {len(blocks) - 1}",
    )


def balanced(
    costs: Sequence[float], parts: int, cannot: Collection[int] = frozenset()
) -> list[int]:
    """Cut a row of costs into runs, the heaviest as light as can be, and then all as even.

    Args:
        costs: Of each.
        parts: Runs.
        cannot: Where none may begin; as many others as there are runs may.

    Returns:
        Where each run begins.
    """
    begins = [i not in cannot for i in range(len(costs))]
    heaviest = _best(costs, parts, max, float("inf"), begins)[0]
    return _best(costs, parts, lambda a, b: a + b * b, heaviest, begins)[1]


def _best(
    costs: Sequence[float],
    parts: int,
    join: Callable[[float, float], float],
    limit: float,
    begins: Sequence[bool],
) -> tuple[float, list[int]]:
    """Return the least value of `join` over the runs, none above `limit`, and their beginnings."""
    n = len(costs)
    before = [0.0]
    for cost in costs:
        before.append(before[-1] + cost)
    infinite = float("inf")
    # best[i]: the least value, and the beginnings, of the first i costs in so many runs.
    best: list[tuple[float, list[int]]] = [(0.0, []), *[(infinite, list[int]())] * n]
    for _ in range(parts):
        best = [
            min(
                (
                    (join(best[j][0], before[i] - before[j]), [*best[j][1], j])
                    for j in range(i)
                    if begins[j] and before[i] - before[j] <= limit * (1 + 1e-12)
                ),
                default=(infinite, list[int]()),
            )
            for i in range(n + 1)
        ]
    return best[n]


def stages(
    policy: Pipeline,
    pp: int,
    blocks: Sequence[str],
    firsts: Sequence[int],
    uses: Mapping[str, frozenset[int]],
    sizes: Mapping[str, int],
    places: Mapping[str, int],
    costs: Sequence[float],
) -> tuple[Stage, ...]:
    """Return the stages; a parameter that several use is in each of them.

    Args:
        policy: The schedule says which rank has which.
        pp: Ranks of a pipeline.
        blocks: Names, in the order of the data.
        firsts: From `first_blocks`.
        uses: In which segments each parameter is used; the name of a segment is its block's number.
        sizes: How many numbers each parameter holds.
        places: In how many modules each is.
        costs: Of each segment.

    Raises:
        LayoutError: A parameter is in several modules of a stage, and the schedule makes halves.
    """
    ends = [*firsts[1:], len(blocks)]
    owned: dict[int, list[str]] = {stage: [] for stage in range(len(firsts))}
    last = 0
    for name, segments in uses.items():
        used = sorted({sum(first <= s for first in firsts) - 1 for s in segments})
        if makes_halves(policy.schedule) and places[name] > max(1, len(used)):
            raise LayoutError(
                f'{name} is in several modules of a stage, which "{policy.schedule}" cannot train.',
                why="torch's half of a backward for the weights goes module by module, and frees "
                "what the next use of the same weight needs",
                do='Pipeline("1f1b"), "gpipe" or "interleaved"',
            )
        # One that the forward does not use stays with those it was written beside.
        last = used[0] if used else last
        for stage in used or [last]:
            owned[stage].append(name)
    total = sum(costs) or 1.0
    return tuple(
        Stage(
            index=i,
            rank=rank_of(i, policy.schedule, pp),
            first=first,
            end=end,
            blocks=tuple(blocks[first:end]),
            parameters=tuple(owned[i]),
            numbers=sum(sizes[name] for name in owned[i]),
            share=sum(costs[first:end]) / total,
        )
        for i, (first, end) in enumerate(zip(firsts, ends, strict=True))
    )
