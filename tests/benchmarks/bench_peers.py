"""What snapshots in a peer's memory add to a training step, against the same steps without.

One cluster of two ranks keeps them every ten steps, and lets it be, in turns. Counted are the wall
time of a step and the processor time of a rank with all its threads, those that send and receive
among them.
"""

import os
import statistics
import tempfile

import nbdist
from tests.benchmarks.table import Row, apart, render

EVERY = 10
GOAL = 0.03  # of a step of 50 ms
_STEPS = 60
_ROUNDS = 3

_BEGIN = """
import time
from nbdist.engine.recovery.snapshots import snapshot
torch.manual_seed(0)
model = torch.nn.Sequential(*[
    torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Tanh()) for _ in range(4)
])
layout = nbdist.parallelize(model, "zero3")
optimizer = layout.optimizer(torch.optim.Adam, lr=1e-3)
batch = torch.randn(BATCH, 512)

def measure(steps, keeps):
    # Both turns begin at the same step on all ranks: they agree on what follows.
    for series in snapshot.here._series.values():
        series.next_step = 0 if keeps else 1 << 60
    began = time.perf_counter(), time.process_time()
    for _ in range(steps):
        model(batch).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    ended = time.perf_counter(), time.process_time()
    return [1e3 * (now - then) / steps for now, then in zip(ended, began)]

measure(3, True)
"""


def rows(rounds: int = _ROUNDS, steps: int = _STEPS, batch: int = 384) -> list[Row]:
    """Return a row for wall time, and one for processor time."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        session = nbdist.start(2, device="cpu", threads=1, peer_snapshots=EVERY)
        try:
            session.run(_BEGIN.replace("BATCH", str(batch)), track=False, show=False)
            taken: list[list[list[float]]] = [[], [], []]  # without, with, without once more
            for _ in range(rounds):
                for turn, keeps in enumerate((False, True, False)):
                    found = session.run(f"measure({steps}, {keeps})", track=False, show=False)
                    taken[turn] += found.value_list
        finally:
            session.stop()
            os.chdir(before)
    return [_row(name, taken, place) for place, name in enumerate(("wall", "processor"))]


def _row(clock: str, taken: list[list[list[float]]], place: int) -> Row:
    first, kept, second = ([one[place] for one in turn] for turn in taken)
    without = statistics.median(first + second)
    return Row(
        f"a peer's snapshots every {EVERY} steps: {clock} time that they add to a step",
        statistics.median(kept) - without,
        "ms",
        without,
        beside="the step without",
        noise=apart(first, second),
        goal=GOAL,
        is_share=True,
    )


if __name__ == "__main__":
    print(render([[row] for row in rows()]))
