"""Rules on the random numbers of dropout."""

from nbdist.client.metrics.checks.planting import both, rows, training
from nbdist.client.metrics.checks.rule import Rule
from nbdist.client.metrics.checks.uses import Seen, Uses, where_told


@where_told("random")
def _drops_alike(seen: Seen) -> str:
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


_MODEL = """model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout())
nbdist.parallelize(model, "ddp")
"""

EQUAL_DROPOUT = Rule(
    "equal-dropout",
    "dropout draws the same numbers on ranks with different samples",
    Uses,
    _drops_alike,
    remedy="Call torch.manual_seed(seed + rank) after parallelize.",
    planted=rows(
        "use",
        {"part": 0, "parts": 2, "random": 7},
        {"part": 1, "parts": 2, "random": 7},
        (1, 2),
    ),
    sound=rows(
        "use",
        {"part": 0, "parts": 2, "random": 7},
        {"part": 1, "parts": 2, "random": 8},
        (1, 2),
    ),
    example=training(_MODEL + "torch.manual_seed(1)"),
    mended=training(_MODEL + "torch.manual_seed(1 + rank)"),
    sources=(
        "https://github.com/huggingface/transformers/issues/31412",
        "https://github.com/huggingface/accelerate/issues/114",
    ),
)


@where_told("random")
def _drops_differently(seen: Seen) -> str:
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


_TP = """block = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
model = torch.nn.Sequential(block, torch.nn.Dropout(), torch.nn.Linear(4, 4))
nbdist.parallelize(model, "tp=2")
"""

UNEQUAL_DROPOUT_IN_GROUP = Rule(
    "unequal-dropout-in-group",
    "dropout draws other numbers on ranks with parts of the same activations",
    Uses,
    _drops_differently,
    remedy="Use one seed in a group of ranks that compute the same activations.",
    planted=rows("use", {"stream": 0, "random": 7}, {"stream": 0, "random": 8}, (1, 2)),
    sound=both("use", (1, 2), stream=0, random=7),
    example=training(_TP + "torch.manual_seed(rank)"),
    mended=training(_TP + "torch.manual_seed(1)"),
    sources=(
        "https://github.com/NVIDIA/Megatron-LM/pull/206",
        "https://github.com/tenstorrent/tt-metal/issues/55947",
    ),
)
