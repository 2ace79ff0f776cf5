"""Run a script as one rank until its first step, for `%dist export --check`.

torchrun starts it: `torchrun ... -m nbdist.engine.rank.first_step SCRIPT RECORDS OPTIONS`. The
script finds a rank that is made already, with its own options; where it makes the process group,
that is taken as done. It ends after the first step of an optimizer on each rank. `RECORDS` then
holds what a board is given: the loss that is compared with that of the notebook's first step.

Main thread.
"""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from nbdist.engine.rank import standalone


def run(script: str, records: str, options: dict[str, Any]) -> None:
    """Run the script until a step is over on all ranks, or to its end.

    Raises:
        SystemExit: A step is over; with 0.
    """
    sys.argv = [script]
    sys.path[0] = str(Path(script).resolve().parent)
    standalone.init(records=records, **options)
    register_optimizer_step_post_hook(_stop)
    runpy.run_path(script, run_name="__main__")


def _stop(*_: Any) -> None:
    dist.barrier()  # who ends while others wait for it in the step would end them with an error
    raise SystemExit(0)


if __name__ == "__main__":
    run(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
