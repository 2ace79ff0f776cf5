"""What the cells of a trial import: data, faults, and what a rank holds as plain values.

The data are those of `data.py`, which the shadow reads too. Main thread of a rank.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_SIGNALS = {"SIGKILL": 9, "SIGSEGV": 11, "SIGABRT": 6, "two ranks killed": 9}
_SIGNALS["second in the repair"] = 9
TOLD = "-told"  # the end of the file that asks the trial to strike from outside


class Leave(Exception):
    """Ends a rank's loop, and nothing else."""


def strike(kind: str, flag: str) -> None:
    """Let this rank meet a fault, once: `flag` begins the names of files that remember it."""
    rank = dist.get_rank()
    try:
        Path(f"{flag}-{rank}").touch(exist_ok=False)
    except FileExistsError:
        return
    if kind in _SIGNALS:
        os.kill(os.getpid(), _SIGNALS[kind])
        time.sleep(60)
    if kind.startswith("os._exit"):
        os._exit(int(kind[9:-1]))
    if kind == "raise":
        raise ValueError(f"struck on rank {rank}")
    if kind == "sys.exit":
        sys.exit(f"struck on rank {rank}")
    if kind == "KeyboardInterrupt":
        raise KeyboardInterrupt(f"struck on rank {rank}")
    if kind == "mismatch":
        dist.all_reduce(torch.ones(7))
    if kind == "leaves early":
        raise Leave
    # From outside: `drive` looks for this file.
    Path(f"{flag}{TOLD}").touch()
    if kind == "SIGSTOP, SIGCONT":
        os.kill(os.getpid(), signal.SIGSTOP)
    while kind == "interrupt a hang":
        time.sleep(0.02)


def look(names: Mapping[str, Any], models: Sequence[str], variables: Sequence[str]) -> str:
    """Return what this rank holds under these names, as JSON. No collective.

    A model is "absent", "placeholder: why", or its parameters by name; each is its numbers, and how
    they were cut from the whole: (dim, place, places), one cut after the other.
    """
    held: dict[str, Any] = {}
    for name in models:
        value = names.get(name)
        if value is None:
            held[name] = "absent"
        elif isinstance(value, torch.nn.Module):
            held[name] = {
                of.removeprefix("module."): _numbers(p) for of, p in value.named_parameters()
            }
        else:
            held[name] = f"placeholder: {value!r}"
    for name in variables:
        value = names.get(name, "absent")
        held[name] = value if isinstance(value, int | str) else repr(value)
    return json.dumps(held)


def _numbers(parameter: torch.Tensor) -> list[Any]:
    mesh = getattr(parameter, "device_mesh", None)
    local = getattr(parameter, "_local_tensor", parameter)
    numbers = local.detach().flatten().tolist()
    if mesh is None:
        return [numbers, []]
    here = (mesh.mesh == dist.get_rank()).nonzero()[0].tolist()
    placed = list(enumerate(parameter.placements))  # type: ignore[attr-defined]
    # Where two dimensions of a mesh cut one of a parameter, the last one did first: tp, then fsdp.
    cuts = [(p.dim, here[i], mesh.size(i)) for i, p in reversed(placed) if hasattr(p, "dim")]
    return [numbers, cuts]
