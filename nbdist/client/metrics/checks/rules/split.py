"""A rule on ranks that share out a part of the data, each another one."""

from nbdist.client.metrics.checks.planting import both, rows, training
from nbdist.client.metrics.checks.rule import Rule
from nbdist.client.metrics.checks.uses import Seen, Step, Uses, where_told

_FEWEST = 3  # reports


@where_told("split")
def _split_differs(seen: Seen) -> str:
    told = [step for step in seen.steps if step.of("split")][-_FEWEST:]
    if len(told) < _FEWEST or not all(map(_is_several, told)):
        return ""
    return (
        "Ranks share out the samples of a Subset that is another one on each rank: its indices "
        f"differ, as in step {told[-1].number:,}. Some samples are trained twice and some never, "
        "and what one rank tests with, another has trained on. Draw the split from one seed: "
        "random_split(data, lengths, generator=torch.Generator().manual_seed(0)), "
        "train_test_split(..., random_state=0)."
    )


def _is_several(step: Step) -> bool:
    """Whether ranks that train one model read different parts."""
    splits: dict[float, set[float]] = {}
    for rank, split in step.of("split").items():
        told = step.by_rank[rank]
        if told.get("parts", 0.0) > 1:
            splits.setdefault(told.get("shared_by", -1.0), set()).add(split)
    return any(len(found) > 1 for found in splits.values())


_SPLIT = """torch.utils.data.TensorDataset(torch.randn(96, 4))
torch.manual_seed(rank)
data, test = torch.utils.data.random_split(data, [64, 32]{})"""
_SEEDED = ", generator=torch.Generator().manual_seed(0)"

UNSEEDED_SPLIT = Rule(
    "unseeded-split",
    "each rank has drawn a split of the data for itself, and they share out its samples",
    Uses,
    _split_differs,
    remedy="Give random_split a generator with a seed, or train_test_split a random_state.",
    planted=rows("use", {"split": 5, "parts": 2}, {"split": 6, "parts": 2}, (1, 2, 5)),
    sound=both("use", (1, 2, 5), split=5, parts=2),
    example=training(data=_SPLIT.format("")),
    mended=training(data=_SPLIT.format(_SEEDED)),
    sources=(
        "https://github.com/TensorAuto/OpenTau/pull/498",
        "https://github.com/Lightning-AI/pytorch-lightning/issues/7728",
        "https://github.com/huggingface/accelerate/issues/2393",
    ),
)
