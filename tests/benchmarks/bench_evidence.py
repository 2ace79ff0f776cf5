"""What it costs a rank to keep the newest steps (`--keep`), as a share of a step of some 50 ms.

Timed where it runs, by the clock of its thread, in a training on two ranks, for with and without it
steps differ by less than their noise. The copies of weights and the optimizer's state, which some
steps make, are spread over all of them. Beside it stands what `--guard` costs by itself: gradients
are read once; and what is written for `%dist diff`, of few steps, over the first `LONG` of a cell.
"""

import statistics

from tests.benchmarks.kernel import Kernel
from tests.benchmarks.table import Row, render

WIDTH = 1792
STEPS = 120  # five times as many as lie between two copies
GOAL = 0.02
LONG = 1000

_CELL = """
import time
from functools import wraps
from time import thread_time_ns
from nbdist.engine.checks import numerics, step_numerics
from nbdist.engine.steps import evidence, forwards, guard
spent_ns = dict.fromkeys(("evidence", "guard", "numerics"), 0)
def timed(owner, name, part):
    native = getattr(owner, name)
    @wraps(native)
    def call(*args, **keywords):
        began_ns = thread_time_ns()
        try:
            return native(*args, **keywords)
        finally:
            spent_ns[part] += thread_time_ns() - began_ns
    setattr(owner, name, call)
    return lambda: setattr(owner, name, native)
kept = ("keep_sound", "stepped", "made_loss", "makes", "gave")
undo = [
    timed(forwards.Forwards, "note", "evidence"),
    *(timed(evidence.Evidence, name, "evidence") for name in kept),
    *(timed(guard, name, "guard") for name in ("norms_of", "_are_finite")),
    *(
        timed(step_numerics.StepNumerics, name, "numerics")
        for name in ("_note", "optimizer_begins", "optimizer_ends")
    ),
    timed(numerics.Numerics, "_write", "numerics"),
]
recorded = [1]
while recorded[-1] < {long}:
    recorded.append(numerics.next_recorded(recorded[-1]))
seen = sum(10 < step <= {steps} + 10 for step in recorded)
of_long = (len(recorded) - 1) / seen * {steps} / {long}  # of what is spent here, a step
torch.manual_seed(rank)
wide = torch.nn.Linear({width}, {width})
model = torch.nn.Sequential(wide, torch.nn.ReLU(), torch.nn.Linear({width}, 8))
layout = nbdist.parallelize(model, "ddp")
optimizer = layout.optimizer(torch.optim.AdamW, lr=1e-3)
for step in range({steps} + 10):
    if step == 10:
        spent_ns.update(dict.fromkeys(spent_ns, 0))
        began = time.perf_counter()
    x, y = torch.randn(64, {width}), torch.randint(0, 8, (64,))
    layout.step(x, y, torch.nn.functional.cross_entropy)
    optimizer.step()
    optimizer.zero_grad()
step_us = 1e6 * (time.perf_counter() - began) / {steps}
for each in undo:
    each()
spent_ns["numerics"] *= of_long
measured = [*(ns / 1e3 / {steps} for ns in spent_ns.values()), step_us]
"""


def rows(rounds: int = 3) -> list[Row]:
    """Return what keeping its newest steps, and leaving bad ones out, adds to a step on a rank."""
    turns = []
    with Kernel() as kernel:
        kernel.run("%load_ext nbdist\n%dist start -n 2 --device cpu --threads 1")
        for _ in range(rounds):
            printed, error, _ = kernel.run(
                f"%%distributed --keep\n{_CELL.format(width=WIDTH, steps=STEPS, long=LONG)}"
            )
            if error:
                raise RuntimeError(f"{error}: {printed}")
            kernel.run("%dist pull measured")
            per_rank = kernel.ask("import json; print(json.dumps(measured))")
            turns.append([statistics.mean(part) for part in zip(*per_rank, strict=True)])
    kept, guard, sketched, step = (statistics.median(part) for part in zip(*turns, strict=True))
    beside = f"a step of AdamW on a rank, of width {WIDTH}"
    return [
        Row(
            *("--keep: evidence of the newest steps", kept, "us", step, beside),
            goal=GOAL,
            is_share=True,
        ),
        Row(f"--keep: sketches, over {LONG} steps", sketched, "us", step, beside, is_share=True),
        Row("--guard: are gradients finite?", guard, "us", step, beside, is_share=True),
    ]


if __name__ == "__main__":
    print(render([[row] for row in rows()]))
