"""A rule on random numbers that ranks draw alike for different samples, as augmentations do."""

from nbdist.client.metrics.checks.planting import rows, training
from nbdist.client.metrics.checks.rule import Rule
from nbdist.client.metrics.checks.uses import Seen, Step, Uses, where_told

_FEWEST = 2  # reports
_SEEDS = {
    "torch": "torch.manual_seed(seed + rank)",
    "python": "random.seed(seed + rank)",
    "numpy": "np.random.seed(seed + rank)",
}


def _is_drawn_alike(step: Step, generator: str) -> bool:
    drawn = step.of(f"drawn_{generator}")
    if not drawn:
        return False
    part = step.of("part")
    is_of_all = drawn.keys() == part.keys() == step.by_rank.keys()
    is_whole = 1 < step.parts == len(set(part.values()))
    return is_of_all and is_whole and len(set(drawn.values())) == 1


@where_told("drawn_torch", "drawn_python", "drawn_numpy")
def _augments_alike(seen: Seen) -> str:
    found = {
        name: numbers
        for name in _SEEDS
        if len(numbers := [s.number for s in seen.steps if _is_drawn_alike(s, name)]) >= _FEWEST
    }
    if not found:
        return ""
    names = " and ".join("Python" if name == "python" else name for name in found)
    since, *_, until = next(iter(found.values()))
    return (
        f"Ranks draw the same random numbers while they make batches of different samples: those "
        f"of {names} were in one state on all ranks, as in steps {since:,} to {until:,}, so that "
        "augmentations repeat from rank to rank. "
        f"Call {' and '.join(_SEEDS[name] for name in found)} before the loop; or give "
        "nbdist.loader a transform=, whose numbers follow from the sample."
    )


_NOISY = """class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        return (torch.full((4,), i / 64) + 0.1 * torch.randn(4),)

data = Noisy()
torch.manual_seed({})
"""
_ZERO, _ONE = {"part": 0, "parts": 2}, {"part": 1, "parts": 2}


def _cell(seed: str) -> str:
    return (
        training(data="None")
        .replace("data = None\n", "")
        .replace("optimizer =", f"{_NOISY.format(seed)}optimizer =", 1)
    )


EQUAL_AUGMENTATIONS = Rule(
    "equal-augmentations",
    "ranks draw the same random numbers for different samples",
    Uses,
    _augments_alike,
    remedy="Seed each rank otherwise once its model is spread, or let nbdist.loader transform.",
    planted=rows("use", _ZERO | {"drawn_torch": 7}, _ONE | {"drawn_torch": 7}, (2, 5)),
    sound=rows("use", _ZERO | {"drawn_torch": 7}, _ONE | {"drawn_torch": 8}, (2, 5)),
    example=_cell("1"),
    mended=_cell("1 + rank"),
    sources=(
        "https://github.com/huggingface/transformers/issues/37932",
        "https://github.com/huggingface/accelerate/issues/236",
        "https://github.com/facebookresearch/detr/issues/297",
    ),
)
