"""The figures of each machine, one file a machine in docs/figures/, and the page that shows them.

A run replaces the groups that it measured and keeps the others. The page's table is written from
all files: a figure is the range over the machines. `goal`s are those of the machine's last run.
"""

import dataclasses
import importlib.metadata
import itertools
import json
import os
import platform
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.table import Row, render

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "figures"
PAGE = ROOT / "docs" / "benchmarks.md"
BEGIN = "<!-- what follows is written by make bench -->"
END = "<!-- this is no longer written by make bench -->"


@dataclass(frozen=True, slots=True)
class Machine:
    """What figures depend on, and what a reader can find out of a machine of their own."""

    cpu: str
    cores: int
    torch: str
    python: str
    gpu: str = ""  # how many of which; empty without one

    @property
    def file_name(self) -> str:
        """The name of its file: the same CPU, cores, GPUs and torch are one machine."""
        version = ".".join(self.torch.split(".")[:2])
        words = f"{self.cpu} {self.cores} cores {self.gpu} torch {version}"
        return re.sub(r"[^a-z0-9.]+", "-", words.lower()).strip("-") + ".json"

    def __str__(self) -> str:
        parts = (self.cpu, f"{self.cores} cores", self.gpu, f"torch {self.torch}")
        return ", ".join([*filter(None, parts), f"Python {self.python}"])


@dataclass(frozen=True, slots=True)
class Group:
    """The rows of one group of benchmarks, and when they were measured."""

    date: str
    note: str  # what else is to be known, such as "others at work"
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Figures:
    """All that is known of one machine."""

    machine: Machine
    groups: Mapping[str, Group]

    def merged(self, measured: Mapping[str, Group]) -> "Figures":
        """Return these with the groups that were measured anew; a group without rows is kept."""
        new = {name: group for name, group in measured.items() if group.rows}
        return Figures(self.machine, {**self.groups, **new})


def this_machine() -> Machine:
    """Return the machine that this process runs on."""
    torch = importlib.metadata.version("torch").split("+")[0]
    return Machine(_cpu(), os.cpu_count() or 1, torch, platform.python_version(), _gpus())


def _cpu() -> str:
    told = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.+)$", told.read_text(), re.M) if told.exists() else []
    return names[0].strip() if names else platform.processor() or platform.machine()


def _gpus() -> str:
    """Return how many GPUs of which kinds the driver of NVIDIA names, such as `1 x NVIDIA H200`."""
    told = Path("/proc/driver/nvidia/gpus").glob("*/information")
    models = Counter(
        model
        for file in told
        for model in re.findall(r"^Model:\s*(.+?)\s*$", file.read_text(), re.M)
    )
    return ", ".join(f"{count} x {model}" for model, count in sorted(models.items()))


def load(folder: Path = FOLDER) -> list[Figures]:
    """Return the figures of every machine, that of the newest run last."""
    found = [read(path) for path in sorted(folder.glob("*.json"))]
    return sorted(found, key=lambda one: max(group.date for group in one.groups.values()))


def read(path: Path) -> Figures:
    """Return the figures of one file."""
    stored: dict[str, Any] = json.loads(path.read_text())
    groups = {
        name: Group(group["date"], group["note"], tuple(Row(**row) for row in group["rows"]))
        for name, group in stored["groups"].items()
    }
    return Figures(Machine(**stored["machine"]), groups)


def save(machine: Machine, measured: Mapping[str, Group], folder: Path = FOLDER) -> Path:
    """Enter what was measured into the machine's file; return its path."""
    path = folder / machine.file_name
    known = read(path).groups if path.exists() else {}
    stored = dataclasses.asdict(Figures(machine, known).merged(measured))
    folder.mkdir(exist_ok=True)
    path.write_text(json.dumps(stored, indent=1) + "\n")
    return path


def table(found: Sequence[Figures], order: Sequence[str]) -> str:
    """Return what the page shows: the machines, the figures over all of them, what falls short.

    Args:
        found: The machines' figures, the newest last.
        order: Names of groups, in the order of the table.
    """
    rows: dict[str, list[Row]] = {}
    for name in order:
        groups = [one.groups[name] for one in found if name in one.groups]
        # A row that the newest run no longer has is no longer a figure of nbdist.
        for row in groups[-1].rows if groups else ():
            rows[row.what] = [r for g in groups for r in g.rows if r.what == row.what]
    machines = [f"- {one.machine}: {_when(one)}" for one in found]
    return "\n".join([*machines, "", render(list(rows.values()))])


def _when(figures: Figures) -> str:
    """Return the days of a machine's groups, and what was noted."""
    by_day = sorted((group.date, group.note, name) for name, group in figures.groups.items())
    days = []
    for (date, note), groups in itertools.groupby(by_day, key=lambda entry: entry[:2]):
        names = ", ".join(name for *_, name in groups)
        days.append(f"{names} on {date}{f' ({note})' if note else ''}")
    return "; ".join(days)


def filled(page: str, text: str) -> str:
    """Return the page with `text` between its two markers.

    Raises:
        ValueError: The page lacks a marker.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"docs/benchmarks.md lacks the line {END if begin else BEGIN!r}.")
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"
