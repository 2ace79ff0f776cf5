"""What ranks run in test_checkpoint_crash: a training that notes each step, and may be killed.

A rank kills itself at the n-th thing that it does with files in the folder of checkpoints: Python
tells an audit hook of each, before it is done.
"""

import gc
import json
import os
import signal
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import nbdist
from nbdist.engine.checkpoint import save as saving
from nbdist.engine.compat.torch_hooks import local_part
from nbdist.engine.data.position import position
from nbdist.engine.group import group
from nbdist.engine.rank import control
from nbdist.shared.wire import CellStart
from tests.group.checkpoint_ranks import Training
from tests.group.parity_cases import Case

_FILES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir"}

CASE = Case(2, "zero3", model="dropping")
EVERY = 2

_watched = ""
_count = 0
_kill_at = 0
_is_hooked = False
_training: Training | None = None


def train(folder: str, log: str, steps: int, kill_at: int = 0) -> dict[str, Any]:
    """Go on from the newest checkpoint, or begin, until so many steps are made; save as it goes.

    Args:
        folder: Of checkpoints; every second step is saved.
        log: A file of this rank's, without the rank; gets a line a step.
        steps: Of the whole training.
        kill_at: At which use of a file in the folder this rank ends; 0 for none.

    Returns:
        `restored` (the step, 0 without) and `uses` (of files in the folder).
    """
    training = _new_training(5)
    _watch(folder, kill_at)
    found = nbdist.restore(folder, missing_ok=True)
    made = 0 if found is None else found.step
    restored = made
    dataset: Any = training.loader.dataset
    numbers = {_key(row): i for i, row in enumerate(dataset.tensors[0])}
    whole, earlier = training._step, saving.here._newest
    with open(f"{log}-{dist.get_rank()}", "a", buffering=1) as lines:

        def step(x: torch.Tensor, y: torch.Tensor) -> None:
            nonlocal made
            whole(x, y)
            made += 1
            samples = [numbers[_key(row)] for row in x]
            lines.write(json.dumps({"step": made, "samples": samples, "sum": _sum(training)}))
            lines.write("\n")
            if made % EVERY == 0:
                nbdist.save(folder, keep=2)
            lines.write(json.dumps({"saved": _committed(earlier)}) + "\n")

        training._step = step  # type: ignore[method-assign]
        if made < steps:
            training.train(steps - made)
        saving.here.settle()
        lines.write(json.dumps({"saved": _committed(earlier)}) + "\n")
    _watch("", 0)
    return {"restored": restored, "uses": _count}


def restore(folder: str, kill_at: int) -> int:
    """Restore, with a death at some use of a file; returns how many uses there were."""
    _new_training(6)
    _watch(folder, kill_at)
    nbdist.restore(folder)
    _watch("", 0)
    return _count


def _new_training(seed: int) -> Training:
    """Return a training as a new cell would make it: of the one before nothing is left."""
    global _training
    if _training is not None:
        _training.end()
    _training = None
    gc.collect()
    position.here.cell_began(CellStart(0, (0, 1), 0))
    _training = Training(CASE, seed=seed)
    return _training


def let_go(dead: list[int]) -> None:
    """As the notebook has a rank do when others have died. Control thread."""
    control.died(dead)
    group.abort()


def newest_save() -> str:
    """Return what became of the newest save of this rank, when it is over."""
    saving.here.settle()
    return repr(saving.here._newest)


def _watch(folder: str, kill_at: int) -> None:
    global _watched, _kill_at, _is_hooked, _count
    if not _is_hooked:
        sys.addaudithook(_heard)
        _is_hooked = True
    if folder:
        _count = 0
    _watched, _kill_at = folder, kill_at


def _heard(event: str, args: tuple[Any, ...]) -> None:
    global _count
    if not _watched or event not in _FILES:
        return
    if str(args[0]).startswith(_watched):
        _count += 1
        if _count == _kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def _committed(earlier: Any) -> int:
    """Return the step of the newest save, if it is of this training and counts already."""
    newest = saving.here._newest
    if newest is None or newest is earlier or not newest.is_done or newest.error is not None:
        return 0
    return newest.step


def _key(row: torch.Tensor) -> tuple[int, ...]:
    return tuple(row.tolist())


def _sum(training: Training) -> int:
    """Return a checksum of this rank's weights and of what its optimizer remembers."""
    found = 0
    for parameter in training.layout.model.parameters():
        state = training.opt.state[parameter]
        for tensor in (parameter.detach(), state["exp_avg"], state["exp_avg_sq"]):
            found = zlib.crc32(local_part(tensor).contiguous().numpy().tobytes(), found)
    return found


def steps_in(log: str, rank: int) -> list[dict[str, Any]]:
    """Return the lines that a rank has written; half a line is none. Called by the test."""
    text = Path(f"{log}-{rank}").read_text() if Path(f"{log}-{rank}").exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]
