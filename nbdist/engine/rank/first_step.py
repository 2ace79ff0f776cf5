"""Run a script as one rank until some steps are over, for `%dist export --check` and `scaling`.

torchrun starts it: `torchrun ... -m nbdist.engine.rank.first_step SCRIPT RECORDS OPTIONS PID`. The
script finds an initialized rank, with its own options; where it makes the process group, the
existing one is used. It ends where an optimizer would step once more than `NBDIST_STEPS`, 1 by
default: then that step is complete, with those of all optimizers, as of a GAN. `RECORDS` then holds
the records of a board: the loss that is compared with that of the notebook's first step, and what
the steps are made of. `NBDIST_LATENCY` names a file for the time of a short collective.

Each rank ends with process PID, the notebook's kernel, and torchrun with its ranks: a rank leads a
session of its own, in which it would outlive both.

Main thread.
"""

import json
import os
import runpy
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from nbdist.engine.rank import standalone
from nbdist.engine.tap import tap
from nbdist.shared.options import LATENCY, STEPS
from nbdist.shared.processes.lifeline import end_with

_TRIES: Final = 30


def run(script: str, records: str, options: dict[str, Any]) -> None:
    """Run the script until its steps are over on all ranks, or to its end.

    Raises:
        SystemExit: They are over; with 0.
    """
    sys.argv = [script]
    sys.path[0] = str(Path(script).resolve().parent)
    device = standalone.init(records=records, **options).device
    if LATENCY in os.environ:
        tap.install()  # what steps are made of is asked for: collectives, too
    register_optimizer_step_pre_hook(_Until(int(os.environ.get(STEPS, "1")), device))
    runpy.run_path(script, run_name="__main__")


class _Until:
    """Ends the script where an optimizer is about to step once more."""

    def __init__(self, steps: int, device: torch.device) -> None:
        self._most, self._device = steps, device
        self._steps = WeakKeyDictionary[Optimizer, int]()

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        made = self._steps.get(optimizer, 0)
        if made >= self._most:
            dist.barrier()  # ending while others wait would end them with an error
            if (file := os.environ.get(LATENCY)) and dist.get_world_size() > 1:
                seconds = _latency_s(self._device)
                if dist.get_rank() == 0:
                    Path(file).write_text(json.dumps(seconds), encoding="utf-8")
            raise SystemExit(0)
        self._steps[optimizer] = made + 1


def _latency_s(device: torch.device) -> float:
    """Return the seconds of an all-reduce that carries next to nothing: the middle of many."""
    tiny, taken = torch.zeros(1, device=device), []
    for _ in range(_TRIES):
        began = time.perf_counter()
        dist.all_reduce(tiny)
        tiny.item()  # a GPU's is over when its number has come
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


if __name__ == "__main__":
    end_with(int(sys.argv[4]))
    run(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
