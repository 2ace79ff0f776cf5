"""What the rules on silent mistakes cost a step: on each rank, and in the notebook for both.

Timed where they run, by the clock of their thread, in a training on two ranks: each rank looks at
few of its steps, and with or without them differs by less than the noise of a step. The step itself
is timed beside them, in the same cell.
"""

import statistics

from tests.benchmarks import step_loop
from tests.benchmarks.kernel import Kernel
from tests.benchmarks.table import Row, render

WIDTH = 768  # some 5 ms a step
STEPS = 1000
GOAL_US = 20.0

# Timed are all that the rank does for the rules: at each step's end, and in the steps it looks at.
_TIMED = """
from functools import wraps
from time import thread_time_ns
from nbdist.engine.checks import checks, use
spent_ns = 0
def timed(kind, name):
    native = getattr(kind, name)
    @wraps(native)
    def call(*args):
        global spent_ns
        began_ns = thread_time_ns()
        try:
            return native(*args)
        finally:
            spent_ns += thread_time_ns() - began_ns
    setattr(kind, name, call)
    return lambda: setattr(kind, name, native)
from nbdist.engine.training import training
on_due = training.here._hooks.on_due
class AtStep:
    ended = staticmethod(on_due)
timed(AtStep, "ended")
training.here.at_due_step(AtStep.ended)
undo = [
    *(timed(use.Use, name) for name in ("_before_forward", "_after_step", "_before_sum")),
    *(timed(checks.RankChecks, name) for name in ("_backward_begins", "_backward_ends")),
]
"""
_UNDONE = """
training.here.at_due_step(on_due)
for each in undo:
    each()
"""
_TRAIN = """
found = measure({width}, 0, {steps})
measured = [spent_ns / 1e3 / {steps}, found[0]]
"""


def rows(rounds: int = 3) -> list[Row]:
    """Return what the rules add to a step on a rank, and in the notebook."""
    turns = []
    with Kernel() as kernel:
        kernel.run("%load_ext nbdist\n%dist start -n 2 --device cpu --threads 1")
        for _ in range(rounds):
            turns.append(_turn(kernel))
    rank, notebook, step = (statistics.median(part) for part in zip(*turns, strict=True))
    beside = f"a step on a rank, of width {WIDTH}"
    return [
        Row(
            *(f"the rules on silent mistakes, a step: {where}", us, "us", step, beside),
            goal=GOAL_US if where == "together" else None,
            goal_on="measured",
            is_share=True,
        )
        for where, us in (
            ("on a rank", rank),
            ("in the notebook, for both ranks", notebook),
            ("together", rank + notebook),
        )
    ]


def _turn(kernel: Kernel) -> tuple[float, float, float]:
    """Return us a step on a rank, mean of both; in the notebook; and of the step itself."""
    cell = "\n".join([step_loop.STEP, _TIMED, _TRAIN.format(width=WIDTH, steps=STEPS), _UNDONE])
    printed, error, _ = kernel.run(f"%%distributed\n{cell}")
    if error:
        raise RuntimeError(f"{error}: {printed}")
    kernel.run("%dist pull measured")
    per_rank = kernel.ask("import json; print(json.dumps(measured))")
    rank, step = (statistics.mean(part) for part in zip(*per_rank, strict=True))
    notebook = kernel.ask(
        "import json, nbdist; print(json.dumps(nbdist.current().checks().cost.notebook_us))"
    )
    return rank, notebook, step


if __name__ == "__main__":
    print(render([[row] for row in rows()]))
