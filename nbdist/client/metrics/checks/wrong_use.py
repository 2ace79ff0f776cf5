"""Rules on how a cell uses one model: what is wrong, in a sentence, from what all ranks reported.

Each rule gets the steps that every rank has reported, oldest first, and answers with a sentence or
"". None decides on a single step where chance could make it look wrong.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from nbdist.shared.text import name_ranks

Values = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Step:
    """What all ranks reported of one step, by rank: "use" rows of `engine/checks/use`.

    `bytes` are those each rank sent in it, where its step's record has come.
    """

    number: int
    by_rank: Mapping[int, Values]
    bytes: Mapping[int, float] = field(default_factory=dict)

    def of(self, name: str) -> dict[int, float]:
        """Return one value of the ranks that reported it."""
        return {rank: values[name] for rank, values in self.by_rank.items() if name in values}

    @property
    def parts(self) -> int:
        """Into how many parts a batch is cut; 0 of a model that nothing spreads."""
        return int(max(self.of("parts").values(), default=0))


@dataclass(frozen=True, slots=True)
class Seen:
    """One optimizer's steps in a cell.

    `first` is what ranks reported before the first one. `collectives` counts those of all steps of
    all ranks, None where ranks do not tell. `rates` are the ranks' learning rates.
    """

    steps: Sequence[Step]
    first: Step | None = None
    collectives: float | None = None
    rates: frozenset[float] = frozenset()

    @property
    def last(self) -> Step:
        """The newest step."""
        return self.steps[-1]


ENOUGH = 5  # the step from which "never" is meant


def trains_nothing(seen: Seen) -> str:
    """No parameter has a gradient when the optimizer steps."""
    idle = [
        {r for r, n in step.of("gradients").items() if n == 0 and step.by_rank[r].get("parameters")}
        for step in seen.steps
    ]
    if len(idle) < 2 or not all(idle[-2:]):
        return ""
    ranks = sorted(idle[-1])
    count = int(seen.last.by_rank[ranks[0]]["parameters"])
    return (
        f"The optimizer of {name_ranks(ranks)} trains nothing: none of its {count} parameters has "
        "a gradient when it steps. It was made before the model was spread, or for another model; "
        "make it after parallelize (or fully_shard), from model.parameters()."
    )


def never_averages(seen: Seen) -> str:
    """A spread model is trained and no rank sends anything."""
    if seen.last.parts < 2 or seen.last.number < ENOUGH or seen.collectives != 0:
        return ""
    return (
        f"Gradients are not averaged: {seen.last.number} steps, and no rank has sent anything. The "
        "layout's hooks are bypassed; call the model itself, model(x), not model.module, "
        "model.forward or its parts, and leave no_sync before the last backward of a step."
    )


def trains_alone(seen: Seen) -> str:
    """Every rank trains a plain model of its own, on its part of the samples or from one start.

    Ranks that begin apart and see all samples may be an ensemble; with other rates, a search.
    """
    first = {} if seen.first is None else seen.first.of("weights")
    now = seen.last.of("weights")
    is_apart = len(now) == len(seen.last.by_rank) > 1 and len(set(now.values())) > 1
    began_alike = len(first) == len(now) and len(set(first.values())) == 1
    shares = all(seen.last.of("shared").values())
    is_one_recipe = len(seen.rates) <= 1 and seen.collectives == 0
    if not (is_apart and is_one_recipe and (began_alike or shares) and seen.last.number >= ENOUGH):
        return ""
    how = "they started equal, and differ" if began_alike else "each learns from its own samples"
    return (
        f"Each rank trains a model of its own: {how}, and in {seen.last.number} steps nothing has "
        'averaged gradients. nbdist.parallelize(model, "ddp") before the optimizer trains one '
        "model on all ranks."
    )


def averages_by_hand(seen: Seen) -> str:
    """The loop all-reduces gradients that are averaged already."""
    recent = [step for step in seen.steps if step.parts > 1 and any(step.of("by_hand").values())]
    if len(recent) < 2:
        return ""
    count = int(max(recent[-1].of("by_hand").values()))
    return (
        f"Gradients are averaged twice: the loop all-reduces {count} gradients that backward has "
        "averaged over ranks already. Leave the all_reduce out; where it sums, the step is as many "
        "times too long as there are ranks."
    )


def began_apart(seen: Seen) -> str:
    """The loop averages gradients itself, of models that began with different weights."""
    first = {} if seen.first is None else seen.first.of("weights")
    by_hand = [step for step in seen.steps if any(step.of("by_hand").values())]
    if len(set(first.values())) < 2 or len(by_hand) < 2 or seen.last.parts:
        return ""
    return (
        "Ranks average gradients of models that began with different weights, so none of them is "
        'trained. nbdist.parallelize(model, "ddp") gives all ranks rank 0\'s; or build the model '
        "after torch.manual_seed with the same seed."
    )


def shards_began_apart(seen: Seen) -> str:
    """Ranks have cut weights of their own into the shards of one model."""
    first = {} if seen.first is None else seen.first.of("weights")
    groups = {} if seen.first is None else seen.first.of("shared_by")
    weights: dict[float, set[float]] = {}
    for rank, group in groups.items():
        weights.setdefault(group, set()).add(first.get(rank, -1.0))  # not known on this rank
    if not any(len(found) > 1 and -1.0 not in found for found in weights.values()):
        return ""
    return (
        "fully_shard cut a model that began with different weights on each rank: its shards do "
        "not form one model. Build it after torch.manual_seed with the "
        'same seed, or let nbdist.parallelize(model, "zero3") give all ranks rank 0\'s.'
    )


def forgets_to_scale(seen: Seen) -> str:
    """The model computes in float16 and no GradScaler has ever scaled a loss."""
    bare = [
        step
        for step in seen.steps
        if all(step.of("half").get(rank) for rank in step.by_rank)
        and not any(step.of("scalers").values())
    ]
    if len(bare) < 2:
        return ""
    return (
        "The model computes in fp16 and its loss is not scaled, so small gradients become 0. "
        "scaler.scale(loss).backward(), scaler.step(optimizer), scaler.update() scale it, with "
        'layout.scaler where Precision("fp16") is given, else a torch.amp.GradScaler; bf16 needs '
        "none."
    )


def steps_past_the_scaler(seen: Seen) -> str:
    """The loss is scaled, and no gradient is divided by the scale before the optimizer steps."""
    scaled = [step for step in seen.steps if all(step.of("scaled").get(r) for r in step.by_rank)]
    past = [step for step in scaled if not any(step.of("unscaled").values())]
    if len(past) < 2:
        return ""
    return (
        "The loss is scaled and the optimizer steps with gradients that still are: thousands of "
        "times too large, and overflows count. scaler.step(optimizer) and scaler.update() in the "
        "place of optimizer.step() divide them, and leave a step with an overflow out."
    )


def feeds_the_same(seen: Seen) -> str:
    """All parts of a batch are the same samples, though samples change."""
    count, kinds = 0, set()
    for step in seen.steps:
        fed = step.of("input")
        parts = {step.by_rank[rank]["part"] for rank in fed if "part" in step.by_rank[rank]}
        if len(parts) > 1 and len(parts) == step.parts and len(set(fed.values())) == 1:
            count += 1
            kinds |= set(fed.values())
    if count < 3 or len(kinds) < 2:
        return ""
    return (
        f"All ranks learn from the same samples: in {count} checked steps their "
        "inputs were equal. nbdist.loader(dataset, global_batch=...) gives each its own part, as "
        "the layout of the newest model says: `del` a newer one whose ranks share samples (tp, pp, "
        "cp). torch's DataLoader needs a DistributedSampler."
    )


def feeds_parts_of_a_group_different(seen: Seen) -> str:
    """Ranks that share weights of one sample get different samples."""
    apart = []
    for step in seen.steps:
        groups: dict[float, set[float]] = {}
        if step.of("shared_by"):
            continue  # shards by hand: ranks of other meshes may train another model
        for rank, fed in step.of("input").items():
            groups.setdefault(step.by_rank[rank].get("part", -1.0 - rank), set()).add(fed)
        apart.append(any(len(fed) > 1 for fed in groups.values()))
    if sum(apart) < 2:
        return ""
    return (
        "Ranks that hold parts of the same weights get different samples, so what they compute "
        "together belongs to none. nbdist.loader gives them the same, as the layout of the newest "
        "model says: `del` a newer one with another layout. A DistributedSampler takes "
        "num_replicas and rank from layout.shape.data_part(rank)."
    )


def drops_alike(seen: Seen) -> str:
    """Dropout draws the same numbers on ranks with different samples."""
    count = 0
    for step in seen.steps:
        drawn = step.of("random")
        parts = {step.by_rank[rank]["part"] for rank in drawn if "part" in step.by_rank[rank]}
        count += len(parts) > 1 and len(parts) == step.parts and len(set(drawn.values())) == 1
    if count < 2:
        return ""
    return (
        "Dropout drops the same on all ranks, which makes their samples less independent: the "
        "random numbers are in the same state. torch.manual_seed(seed + rank) after parallelize."
    )


def drops_differently(seen: Seen) -> str:
    """Dropout draws other numbers on ranks that hold parts of the same activations."""
    apart = 0
    for step in seen.steps:
        streams: dict[float, set[float]] = {}
        for rank, drawn in step.of("random").items():
            if "stream" in step.by_rank[rank]:
                streams.setdefault(step.by_rank[rank]["stream"], set()).add(drawn)
        apart += any(len(drawn) > 1 for drawn in streams.values())
    if apart < 2:
        return ""
    return (
        "Dropout drops differently on ranks of one tp or cp group, where activations are equal: a "
        "seed was set that depends on the rank. Use the same seed in a group, "
        "torch.manual_seed(seed + layout.shape.data_part(rank)[0]), or none after parallelize."
    )


def keeps_own_statistics(seen: Seen) -> str:
    """Batch norm's running statistics are each rank's own."""
    apart = [len(set(step.of("statistics").values())) > 1 for step in seen.steps]
    if len(apart) < 2 or not all(apart[-2:]):
        return ""
    return (
        "Batch norm keeps other running statistics on each rank, so a model evaluates differently "
        'on each. nbdist.parallelize(model, "ddp") keeps rank 0\'s on all; '
        "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) computes them over all ranks."
    )


def repeats_an_order(seen: Seen) -> str:
    """A sampler that shuffles begins another pass in the order of the one before."""
    if not any(any(step.of("same_epoch").values()) for step in seen.steps):
        return ""
    return (
        "Each epoch has the same order: the DistributedSampler shuffles by its epoch, which is "
        "never set. Call sampler.set_epoch(epoch) before each pass; nbdist.loader counts by itself."
    )


def averages_each_part(seen: Seen) -> str:
    """Gradients are averaged and then added to, where the last backward alone would do."""
    wasted = [
        (rank, int(count) + 1)
        for step in seen.steps
        for rank, count in step.of("sums").items()
        if count
        # Of a GAN's backwards the last may be another optimizer's: the others must average then.
        and step.by_rank[rank].get("optimizers", 1.0) == 1
        and 0 < 1.9 * step.by_rank[rank].get("averaged_bytes", 0.0) <= step.bytes.get(rank, 0.0)
    ]
    if len({rank for rank, _ in wasted}) < len(seen.last.by_rank) or len(wasted) < 2:
        return ""
    count = wasted[-1][1]
    return (
        f"Each of {count} backwards of a step averages all gradients, where the last alone would "
        f"do: {count - 1} of {count} bytes are sent for nothing. for part in "
        f"layout.accumulate({count}) leaves them out; with DistributedDataParallel, no_sync()."
    )


RULES: tuple[Callable[[Seen], str], ...] = (
    trains_nothing,
    never_averages,
    trains_alone,
    averages_by_hand,
    began_apart,
    shards_began_apart,
    forgets_to_scale,
    steps_past_the_scaler,
    feeds_the_same,
    feeds_parts_of_a_group_different,
    drops_alike,
    drops_differently,
    keeps_own_statistics,
    repeats_an_order,
    averages_each_part,
)
