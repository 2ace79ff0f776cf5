"""A rule on what a cell or a script has left changed in the ranks' processes, unsaid.

What the notebook's own code names is meant, and no rank tells of it (`engine/checks/left_changed`).
"""

from collections.abc import Callable, Mapping

from nbdist.client.metrics.checks.planting import rows
from nbdist.client.metrics.checks.rule import Rule, WatchedCell, Watcher
from nbdist.shared.text import name_ranks
from nbdist.shared.wire import CELL_END, DEFAULT_DTYPES, Record

Values = Mapping[str, float]


class LeftChanged(Watcher[Mapping[int, Values]]):
    """What each rank has told of at the cell's end."""

    kinds = frozenset(("left",))

    def __init__(self, cell: WatchedCell) -> None:
        """Begin with nothing known."""
        self._by_rank: dict[int, Values] = {}

    def take(self, record: Record) -> None:
        """Take in what a rank tells at the cell's end."""
        if "script" in record.values:
            self._by_rank[record.rank] = record.values

    def end(self) -> Mapping[int, Values] | None:
        """Return what ranks have told."""
        return self._by_rank or None


def _dtype(values: Values, name: str) -> str:
    return DEFAULT_DTYPES[int(values[name])]


# What is said of each value of a row, and how it is put back.
_SAID: Mapping[str, tuple[Callable[[Values], str], Callable[[Values], str]]] = {
    "dtype": (
        lambda values: (
            f"torch's default dtype is {_dtype(values, 'dtype')}, "
            f"and was {_dtype(values, 'dtype_before')}"
        ),
        lambda values: f"torch.set_default_dtype(torch.{_dtype(values, 'dtype_before')})",
    ),
    "gc_off": (lambda _: "the garbage collector is off", lambda _: "gc.enable()"),
    "grad_off": (lambda _: "gradients are off", lambda _: "torch.set_grad_enabled(True)"),
    "anomaly_on": (
        lambda _: "autograd's anomaly detection is on, which is slow",
        lambda _: "torch.autograd.set_detect_anomaly(False)",
    ),
    "stdout_lost": (
        lambda _: "sys.stdout is another object, and what is printed no longer comes here",
        lambda _: "sys.stdout as it was before the call",
    ),
    "stderr_lost": (
        lambda _: "sys.stderr is another object, and what goes there no longer comes here",
        lambda _: "sys.stderr as it was before the call",
    ),
}


def _is_changed(by_rank: Mapping[int, Values]) -> str:
    ranks = sorted(by_rank)
    values: dict[str, float] = {}
    for rank in ranks:
        values |= by_rank[rank]
    said, back = zip(
        *((say(values), put(values)) for name, (say, put) in _SAID.items() if name in values),
        strict=True,
    )
    who = "The script" if values["script"] else "What this cell has called"
    return (
        f"{who} has left its processes changed on {name_ranks(ranks)}, and the next cells meet "
        f"it: {'; '.join(said)}. Put it back: {'; '.join(back)}."
    )


_LIBRARY = """import types
half = types.ModuleType("half")  # such as one that was installed
exec('''
import torch
def build():
    torch.set_default_dtype(torch.bfloat16)
{}''', vars(half))
model = half.build()
"""
_LEAVES = "    return torch.nn.Linear(4, 4)\n"
_PUTS_BACK = """    try:
        return torch.nn.Linear(4, 4)
    finally:
        torch.set_default_dtype(torch.float32)
"""
_ROW = {"script": 0, "dtype": 2, "dtype_before": 0}

LEFT_CHANGED = Rule(
    "left-changed",
    "a library or a script has left default dtype, gc, gradients or sys.stdout changed",
    LeftChanged,
    _is_changed,
    remedy="Put back what a call has changed, in a finally: the next cells run in the same "
    "processes.",
    planted=rows("left", _ROW, _ROW, (CELL_END,)),
    sound=rows("left", {"backwards": 1}, {"backwards": 1}, (CELL_END,)),
    example=_LIBRARY.format(_LEAVES),
    mended=_LIBRARY.format(_PUTS_BACK),
    sources=(
        "https://github.com/huggingface/transformers/issues/28461",
        "https://github.com/facebookresearch/dinov3/issues/150",
        "https://github.com/ipython/ipython/issues/11027",
    ),
)
