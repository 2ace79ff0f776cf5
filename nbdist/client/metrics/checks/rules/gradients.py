"""Rules on gradients: that there are any, and that they are averaged over ranks, once."""

from nbdist.client.metrics.checks.planting import DDP, both, training
from nbdist.client.metrics.checks.rule import Rule
from nbdist.client.metrics.checks.uses import ENOUGH, Seen, Uses, Values, where_told
from nbdist.shared.text import name_ranks


def _is_idle(told: Values) -> bool:
    """Whether none of what it could train has a gradient, or has been trained in the cell."""
    return bool(told.get("parameters") and told.get("gradients") == 0 and not told.get("trained"))


def _trains_nothing(seen: Seen) -> str:
    idle = [{r for r, told in step.by_rank.items() if _is_idle(told)} for step in seen.steps]
    if len(idle) < 2 or not all(idle[-2:]):
        return ""
    ranks = sorted(idle[-1])
    count = int(seen.last.by_rank[ranks[0]]["parameters"])
    return (
        f"The optimizer of {name_ranks(ranks)} trains nothing: none of its {count} parameters has "
        "a gradient when it steps. It was made before the model was spread, or for another model; "
        "make it after parallelize (or fully_shard), from model.parameters()."
    )


_SHARD = "from torch.distributed.fsdp import fully_shard\nmodel = torch.nn.Linear(4, 4)\n"
_EARLY = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"

OPTIMIZER_WITHOUT_GRADIENTS = Rule(
    "optimizer-without-gradients",
    "no parameter has a gradient when the optimizer steps",
    Uses,
    _trains_nothing,
    remedy="Make the optimizer after the model is spread, from its parameters as they are then.",
    planted=both("use", (1, 2), parameters=4, gradients=0),
    sound=both("use", (1, 2), parameters=4, gradients=4),
    example=training(_SHARD + _EARLY + "fully_shard(model)").replace(
        f"(model)\n{_EARLY}", "(model)\n"
    ),
    mended=training(_SHARD + "fully_shard(model)"),
    sources=(
        "https://github.com/huggingface/accelerate/issues/3256",
        "https://github.com/huggingface/accelerate/issues/3209",
    ),
)


def _never_averages(seen: Seen) -> str:
    made = seen.last.number - seen.steps[0].number + 1
    if seen.last.parts < 2 or made < ENOUGH or seen.collectives != 0:
        return ""
    return (
        f"Gradients are not averaged: {made} steps, and no rank has sent anything. The "
        "layout's hooks are bypassed; call the model itself, model(x), not model.module, "
        "model.forward or its parts, and leave no_sync before the last backward of a step."
    )


_WRAPPED = "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))"

UNSYNCED_GRADIENTS = Rule(
    "unsynced-gradients",
    "a spread model is trained, and no rank sends anything",
    Uses,
    _never_averages,
    remedy="Call the model itself: its parts and methods do not run the hooks that average.",
    planted=both("step", (5,), collectives=0) + both("use", (1, 5), parts=2),
    sound=both("step", (5,), collectives=1) + both("use", (1, 5), parts=2),
    example=training(_WRAPPED, backward="model.module(x).square().mean().backward()"),
    mended=training(_WRAPPED),
    sources=(
        "https://github.com/bytetriper/RAE/issues/40",
        "https://github.com/kohya-ss/sd-scripts/issues/924",
    ),
)


@where_told("by_hand")
def _averages_by_hand(seen: Seen) -> str:
    recent = [step for step in seen.steps if step.parts > 1 and any(step.of("by_hand").values())]
    if len(recent) < 2:
        return ""
    count = int(max(recent[-1].of("by_hand").values()))
    return (
        f"Gradients are averaged twice: the loop all-reduces {count} gradients that backward has "
        "averaged over ranks already. Leave the all_reduce out; where it sums, the step is as many "
        "times too long as there are ranks."
    )


_BY_HAND = """model(x).square().mean().backward()
for p in model.parameters():
    dist.all_reduce(p.grad)
    p.grad /= world_size"""

GRADIENTS_AVERAGED_TWICE = Rule(
    "gradients-averaged-twice",
    "the loop all-reduces gradients that are averaged already",
    Uses,
    _averages_by_hand,
    remedy="Leave the all_reduce of gradients out: backward has averaged them.",
    planted=both("use", (1, 2), parts=2, by_hand=4),
    sound=both("use", (1, 2), parts=2, by_hand=0),
    example=training(backward=_BY_HAND),
    mended=training(),
    sources=(
        "https://github.com/kubeflow/pytorch-operator/issues/122",
        "https://github.com/pytorch/tutorials/issues/2305",
    ),
)


@where_told("sums")
def _averages_each_part(seen: Seen) -> str:
    wasted = [
        (rank, int(count) + 1)
        for step in seen.steps
        for rank, count in step.of("sums").items()
        if count
        # Of a GAN's backwards the last may be another optimizer's: the others must average then.
        and step.by_rank[rank].get("optimizers", 1.0) == 1
        and _sends_again(step.by_rank[rank])
    ]
    if len({rank for rank, _ in wasted}) < len(seen.last.by_rank) or len(wasted) < 2:
        return ""
    count = wasted[-1][1]
    return (
        f"Each of {count} backwards of a step averages all gradients, where the last alone would "
        f"do: {count - 1} of {count} bytes are sent for nothing. for part in "
        f"layout.accumulate({count}) leaves them out; with DistributedDataParallel, no_sync()."
    )


def _sends_again(told: Values) -> bool:
    """Whether a second backward of the step has sent all gradients.

    What the step sends beside its backwards says nothing: the optimizer of zero1 sends weights.
    """
    return 0 < 0.9 * told.get("averaged_bytes", 0.0) <= told.get("sent_again", 0.0)


_PARTS = """for part in {}:
    model(x).square().mean().backward()"""
_LAYOUT = DDP.replace("nbdist.", "layout = nbdist.")

NEEDLESS_AVERAGING = Rule(
    "needless-averaging",
    "each backward of a step averages, where the last alone would do",
    Uses,
    _averages_each_part,
    remedy="Let only the last backward of a step average: layout.accumulate(k), or no_sync().",
    planted=both("use", (1, 2), sums=1, averaged_bytes=8, sent_again=8),
    sound=both("use", (1, 2), sums=1, averaged_bytes=8, sent_again=0),
    example=training(_LAYOUT, backward=_PARTS.format("range(2)")),
    mended=training(_LAYOUT, backward=_PARTS.format("layout.accumulate(2)")),
    sources=(
        "https://huggingface.co/docs/accelerate/concept_guides/gradient_synchronization",
        "https://lightning.ai/docs/pytorch/LTS/fabric/advanced/gradient_accumulation.html",
    ),
)
