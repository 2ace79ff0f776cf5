"""Run a script as one rank until its first step, for `%dist export --check`.

torchrun starts it: `torchrun ... -m nbdist.engine.rank.first_step SCRIPT RECORDS OPTIONS`. The
script finds an initialized rank, with its own options; where it makes the process group,
the existing one is used. It ends where an optimizer would step again: then the first step is
complete, with those of all optimizers, as of a GAN. `RECORDS` then holds the records of a
board: the loss that is compared with that of the notebook's first step.

Main thread.
"""

import json
import runpy
import sys
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch.distributed as dist
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from nbdist.engine.rank import standalone


def run(script: str, records: str, options: dict[str, Any]) -> None:
    """Run the script until a step is over on all ranks, or to its end.

    Raises:
        SystemExit: A step is over; with 0.
    """
    sys.argv = [script]
    sys.path[0] = str(Path(script).resolve().parent)
    standalone.init(records=records, **options)
    register_optimizer_step_pre_hook(_UntilTheSecond())
    runpy.run_path(script, run_name="__main__")


class _UntilTheSecond:
    """Ends the script where an optimizer is about to step a second time."""

    def __init__(self) -> None:
        self._stepped = WeakSet[Optimizer]()

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer in self._stepped:
            dist.barrier()  # ending while others wait would end them with an error
            raise SystemExit(0)
        self._stepped.add(optimizer)


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
