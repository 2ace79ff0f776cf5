"""How the models of a trial are spread: which ranks see which data, and what a rank holds. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

ARCHITECTURES = ("linear", "mlp", "batchnorm", "dropout", "deep", "attention")


@dataclass(frozen=True, slots=True)
class Layout:
    """A way to spread a model: words of `parallelize`, or torch's own.

    Attributes:
        weight: How often it is drawn.
        n: How many ranks it needs; None: any number.
        share: Which share of a step's data a rank sees, as Python of `rank`.
        is_sharded: Each rank has a part of the model, of which there may be no other.
        is_split: Each rank has the model, and a part of the optimizer's states.
        architectures: Of those models that it can spread.
    """

    weight: float
    n: int | None = None
    share: str = "rank"
    is_sharded: bool = False
    is_split: bool = False
    architectures: tuple[str, ...] = ARCHITECTURES


_CUT = ("deep",)  # a linear that leads into another, and back
_STAGED = ("mlp", "deep")  # of which micro-batches make what the whole batch makes

LAYOUTS = {
    "ddp": Layout(6),
    "zero1": Layout(3, is_split=True),
    "zero2": Layout(1, is_sharded=True),
    "zero3": Layout(2, is_sharded=True),
    "dp=2 fsdp=2": Layout(2, 4, is_sharded=True),
    "tp=2": Layout(2, 2, "0", is_sharded=True, architectures=_CUT),
    "dp=2 tp=2": Layout(2, 4, "rank // 2", is_sharded=True, architectures=_CUT),
    "fsdp=2 tp=2": Layout(1, 4, "rank // 2", is_sharded=True, architectures=_CUT),
    "pp=2": Layout(2, 2, "0", is_sharded=True, architectures=_STAGED),
    "pp=2 dp=2": Layout(2, 4, "rank % 2", is_sharded=True, architectures=_STAGED),
    "cp=2": Layout(1, 2, "0", architectures=("attention",)),
    "dp=2 cp=2": Layout(1, 4, "rank // 2", architectures=("attention",)),
    "DDP": Layout(3),
    "DDP on a group": Layout(2),  # on three ranks or more
    "fully_shard": Layout(2, is_sharded=True),
    "DDP and ZeRO": Layout(2, is_split=True),
}


def fitting(n: int, *, without: Callable[[str], bool] = lambda _: False) -> dict[str, float]:
    """Return how often each layout is drawn that `n` ranks can have."""
    return {
        name: layout.weight
        for name, layout in LAYOUTS.items()
        if layout.n in (None, n) and not without(name)
    }


def shares(layout: str, members: Sequence[int]) -> list[int]:
    """Return the shares of a step's data that its members see, each once."""
    return sorted({eval(LAYOUTS[layout].share, None, {"rank": rank}) for rank in members})


def is_piped(layout: str) -> bool:
    """Return whether ranks hold stages, and a step is the layout's own."""
    return layout.startswith("pp")
