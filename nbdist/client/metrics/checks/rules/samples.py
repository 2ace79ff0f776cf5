"""Rules on what ranks learn from: their own part of each batch, in another order each pass."""

from nbdist.client.metrics.checks.planting import both, rows, training
from nbdist.client.metrics.checks.rule import Rule
from nbdist.client.metrics.checks.uses import Seen, Step, Uses, where_told


@where_told("input")
def _feeds_the_same(seen: Seen) -> str:
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
        "cp), or %dist restart where `Out` has kept it. torch's DataLoader needs a "
        "DistributedSampler."
    )


_ZERO, _ONE = {"part": 0, "parts": 2}, {"part": 1, "parts": 2}

SAME_SAMPLES = Rule(
    "same-samples",
    "all parts of a batch are the same samples",
    Uses,
    _feeds_the_same,
    remedy="Give each rank its own part of each batch: nbdist.loader, or a DistributedSampler.",
    planted=[
        *rows("use", _ZERO | {"input": 7}, _ONE | {"input": 7}, (1, 2)),
        *rows("use", _ZERO | {"input": 8}, _ONE | {"input": 8}, (5,)),
    ],
    sound=[
        *rows("use", _ZERO | {"input": 7}, _ONE | {"input": 9}, (1, 2)),
        *rows("use", _ZERO | {"input": 8}, _ONE | {"input": 6}, (5,)),
    ],
    example=training(loader="torch.utils.data.DataLoader(data, batch_size=4)"),
    mended=training(),
    sources=(
        "https://github.com/huggingface/datasets/issues/5360",
        "https://github.com/yaak-ai/rbyte/pull/106",
    ),
)


@where_told("input")
def _feeds_parts_of_a_group_different(seen: Seen) -> str:
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
        "model says: `del` a newer one with another layout, or %dist restart where `Out` has kept "
        "it. A DistributedSampler takes "
        "num_replicas and rank from layout.shape.data_part(rank)."
    )


_TP = """block = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
model = torch.nn.Sequential(block, torch.nn.Linear(4, 4))
nbdist.parallelize(model, "tp=2")"""
_SAMPLER = "sampler=torch.utils.data.DistributedSampler(data)"

UNEQUAL_SAMPLES_IN_GROUP = Rule(
    "unequal-samples-in-group",
    "ranks that share the weights of one sample get different samples",
    Uses,
    _feeds_parts_of_a_group_different,
    remedy="Give ranks that share a sample's computation the same samples, as nbdist.loader does.",
    planted=rows("use", {"part": 0, "input": 7}, {"part": 0, "input": 8}, (1, 2)),
    sound=both("use", (1, 2), part=0, input=7),
    example=training(_TP, loader=f"torch.utils.data.DataLoader(data, batch_size=4, {_SAMPLER})"),
    mended=training(_TP),
    sources=(
        "https://github.com/huggingface/accelerate/issues/3092",
        "https://github.com/pytorch/torchtitan/pull/49",
    ),
)


def _repeating(seen: Seen, *, made_anew: bool) -> Step | None:
    """Return the step in which a pass has begun in the order of an earlier one."""
    for step in seen.steps:
        if any(step.of("same_epoch").values()) and any(step.of("made_anew").values()) == made_anew:
            return step
    return None


@where_told("same_epoch")
def _repeats_an_order(seen: Seen) -> str:
    if _repeating(seen, made_anew=False) is None:
        return ""
    return (
        "Each epoch has the same order: the DistributedSampler shuffles by its epoch, which is "
        "never set. Call sampler.set_epoch(epoch) before each pass; nbdist.loader counts by itself."
    )


_EPOCHS = """torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(64, 4))
model = torch.nn.Linear(4, 4)
nbdist.parallelize(model, "ddp")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{before}for epoch in range(2):
    for (x,) in {loader}:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
_FOR = "for epoch in range(2):\n"
_SAMPLED = _EPOCHS.format(
    before="sampler = torch.utils.data.DistributedSampler(data)\n",
    loader="torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler)",
)

REPEATED_ORDER = Rule(
    "repeated-order",
    "a sampler that shuffles begins another pass in the order of an earlier one",
    Uses,
    _repeats_an_order,
    remedy="Call sampler.set_epoch(epoch) before each pass.",
    planted=both("use", (9,), same_epoch=1, made_anew=0, own_loader=0),
    sound=both("use", (9,)),
    example=_SAMPLED,
    mended=_SAMPLED.replace(_FOR, f"{_FOR}    sampler.set_epoch(epoch)\n"),
    sources=(
        "https://github.com/pytorch/pytorch/issues/31771",
        "https://github.com/cszn/KAIR/issues/106",
    ),
)


@where_told("same_epoch")
def _begins_anew(seen: Seen) -> str:
    step = _repeating(seen, made_anew=True)
    if step is None:
        return ""
    is_own = any(step.of("own_loader").values())
    what = "nbdist.loader" if is_own else "a DistributedSampler"
    remedy = (
        "Call nbdist.loader once, before the loop over epochs: it counts them by itself."
        if is_own
        else "Make it once, before the loop over epochs, and call sampler.set_epoch(epoch) before "
        "each pass."
    )
    return (
        f"Each epoch has the same order: {what} is made anew for each pass, and begins at the same "
        f"epoch each time, as at step {step.number:,}. {remedy}"
    )


_ANEW = _EPOCHS.format(before="", loader="nbdist.loader(data, global_batch=8)")

LOADER_PER_EPOCH = Rule(
    "loader-per-epoch",
    "a loader or sampler that is made anew for each pass begins at epoch 0 each time",
    Uses,
    _begins_anew,
    remedy="Make the loader once, before the loop over epochs.",
    planted=both("use", (9,), same_epoch=1, made_anew=1, own_loader=1),
    sound=both("use", (9,)),
    example=_ANEW,
    mended=_EPOCHS.format(before="loader = nbdist.loader(data, global_batch=8)\n", loader="loader"),
    sources=(
        "https://docs.pytorch.org/docs/stable/data.html",
        "https://github.com/pytorch/pytorch/issues/11324",
    ),
)
