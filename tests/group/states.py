"""What ranks run in the tests of what they tell of themselves."""

import time
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from nbdist.engine.kernel import location
from nbdist.engine.kernel.records import Recorder
from nbdist.engine.rank import control
from nbdist.engine.tap import tap
from nbdist.engine.training import training
from tests.group.faults import held


class Slow(Dataset[torch.Tensor]):
    """One item, which takes its time."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(2)
        return torch.ones(1)


def begin() -> None:
    """Put the tap and the training hooks in place, and make a group of ranks 0 and 1."""
    tap.install("full")
    training.here.install(Recorder(dist.get_rank(), lambda batch: None))
    held["sub"] = dist.new_group([0, 1])
    tap.reset_counts()


def run_cell(code: str) -> str:
    """Run code as a cell's; returns the name of the error it ended with."""
    names: dict[str, Any] = {
        "dist": dist,
        "held": held,
        "x": torch.ones(4),
        "DataLoader": DataLoader,
        "Slow": Slow,
        "sleep": time.sleep,
    }
    location.here.running = 5
    try:
        exec(compile(code, "/tmp/ipykernel_nbdist/cell.py", "exec"), names)
    except RuntimeError as error:
        return type(error).__name__
    finally:
        location.here.running = None
    return ""


def state() -> dict[str, Any]:
    """Return what the rank says; on its control thread."""
    return control.state()
