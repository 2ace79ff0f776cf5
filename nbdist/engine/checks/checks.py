"""Tell, at the ends of some steps, what the notebook compares between ranks.

Main thread, in the hook on optimizers. Steps are chosen by their number alone, so that all ranks
tell of the same ones: soon after a cell's begin, where most goes wrong, then every `EVERY`.
"""

import weakref
from collections.abc import Callable
from itertools import islice

from torch import Tensor
from torch.optim import Optimizer

from nbdist.engine import trained
from nbdist.engine.checks.alike import held_alike
from nbdist.engine.checks.fingerprint import as_float, fingerprints
from nbdist.engine.layout.layout import Layout

EVERY = 100
SOON = frozenset({1, 2, 5, 10, 20, 50})
MOST_NUMBERS = 1000  # of one model: tensors beyond are told together

Add = Callable[[str, int, dict[str, float]], None]


def is_due(step: int) -> bool:
    """Return whether ranks tell of this step."""
    return step in SOON or step % EVERY == 0


class Checks:
    """What one rank tells: of the models that the cell trains, in the order of their first steps.

    Others may be alive on some ranks only, for Python frees them when it likes.
    """

    def __init__(self, add: Add) -> None:
        """Begin.

        Args:
            add: Makes a record of a kind, a step and its values.
        """
        self._add = add
        self._layouts: list[weakref.ref[Layout]] = []

    def begin_cell(self) -> None:
        """Nothing is trained yet."""
        self._layouts.clear()

    def optimizer_begins(self, optimizer: Optimizer) -> None:
        """Take note of what an optimizer trains; before its first step in a cell."""
        layout = trained.spread_by(optimizer)
        if isinstance(layout, Layout):
            self._layouts.append(weakref.ref(layout))

    def step_ended(self, step: int) -> None:
        """Tell what this rank holds, if this step is one of those.

        Costs a pass over the parameters, at most `fingerprint.SELECTION` elements of each; on a
        GPU it waits for what is queued.
        """
        if is_due(step):
            values: dict[str, float] = {}
            for number, reference in enumerate(self._layouts):
                layout = reference()
                prefix = f"{number}:" if number else ""
                if layout is not None:
                    values |= _told([(prefix + n, t) for n, t in held_alike(layout) if t.numel()])
            if values:
                self._add("alike", step, values)


def _told(held: list[tuple[str, Tensor]]) -> dict[str, float]:
    """Return a fingerprint by name; of very many tensors, one for a few neighbours each."""
    if not held:
        return {}
    names, tensors = zip(*held, strict=True)
    together = -(-len(held) // MOST_NUMBERS)
    prints = iter(fingerprints(tensors).tolist())
    return {name: as_float(sum(islice(prints, together))) for name in names[::together]}
