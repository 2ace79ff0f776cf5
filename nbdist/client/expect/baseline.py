"""The baseline of a notebook's runs: a small file beside it, for the repository.

`train.ipynb` has `train.baseline.json`. It holds the figures of each run by its name and number of
ranks; times of steps also by machine, for they say nothing of another. People read the file in
diffs: it is sorted, and numbers are rounded.
"""

import functools
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbdist.client.metrics.usual_step import RunFigures, StepTime
from nbdist.client.tracking.provenance import notebook_path
from nbdist.shared.errors import TrackingError
from nbdist.shared.text import counted

_VERSION = 1
_ABOUT = "What %dist expect compares runs with. Made by pytest --nbdist --nbdist-baseline."


def baseline_file() -> Path:
    """Return the file of this kernel's notebook; where its name is not known, one of the folder."""
    notebook = notebook_path()
    return Path.cwd() / f"{'notebook' if notebook is None else notebook.stem}.baseline.json"


@dataclass(frozen=True, slots=True)
class Stored:
    """A run as a baseline holds it: `figures`, whose `time` is this machine's if it has one.

    `machines` are those whose times of steps it has.
    """

    figures: RunFigures
    machines: tuple[str, ...]


def stored_run(file: Path, name: str, world_size: int) -> Stored | None:
    """Return a run's baseline on so many ranks; None without one.

    Raises:
        TrackingError: The file cannot be read.
    """
    run = _read(file)["runs"].get(name, {}).get(_ranks(world_size))
    if run is None:
        return None
    try:
        time = run["step_ms"].get(machine())
        figures = RunFigures(
            world_size=world_size,
            steps=run["steps"],
            kinds=tuple(run["collectives"]),
            in_all=tuple(run["in_all"]),
            bytes=run["bytes"],
            time=None if time is None else StepTime(time["ms"], time["noise"], 0.0, time["steps"]),
        )
        return Stored(figures, tuple(run["step_ms"]))
    except (KeyError, TypeError, AttributeError) as error:
        raise _unreadable(file, error) from error


def store_run(file: Path, name: str, figures: RunFigures) -> None:
    """Write a run's figures; times of other machines stay.

    Raises:
        TrackingError: The file cannot be read or written.
    """
    content = _read(file)
    of_name = content["runs"].setdefault(name, {})
    times = of_name.get(_ranks(figures.world_size), {}).get("step_ms", {})
    of_name[_ranks(figures.world_size)] = {
        "steps": figures.steps,
        "collectives": [dict(kinds) for kinds in figures.kinds],
        "in_all": list(figures.in_all),
        "bytes": None if figures.bytes is None else round(figures.bytes, 1),
        "step_ms": times | _time(figures.time),
    }
    text = json.dumps({"about": _ABOUT} | content, indent=1, sort_keys=True) + "\n"
    fresh = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        fresh.write_text(text)
        fresh.replace(file)  # whole, or not at all
    except OSError as error:
        raise TrackingError(
            f"The baseline {file.name} could not be written.",
            why=str(error),
            do="make the notebook's folder writable",
        ) from error


def _time(time: StepTime | None) -> Mapping[str, Any]:
    if time is None:
        return {}
    rounded = {"ms": round(time.ms, 4), "noise": round(time.noise, 3), "steps": time.steps}
    return {machine(): rounded}


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
        if content["version"] != _VERSION:
            raise ValueError(f"version {content['version']}, and this nbdist reads {_VERSION}")
        return {"version": _VERSION, "runs": dict(content["runs"])}
    except FileNotFoundError:
        return {"version": _VERSION, "runs": {}}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: Exception) -> TrackingError:
    return TrackingError(
        f"The baseline {file.name} cannot be read.",
        why=f"{type(error).__name__}: {error}",
        do=f"git checkout {file.name}, or delete it and make it again: "
        "pytest --nbdist --nbdist-baseline",
    )


def _ranks(world_size: int) -> str:
    return counted(world_size, "rank")


@functools.cache
def machine() -> str:
    """Return the machine as far as times depend on it: its processor, and how many cores."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        name = next(models, name)
    except OSError:
        pass  # not Linux
    return f"{name}, {counted(os.cpu_count() or 1, 'core')}"
