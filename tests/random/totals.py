"""The totals of many trials as a table: what struck, what was struck, and what came of it. Pure."""

import importlib.metadata
import json
import os
import platform
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

_OUTCOMES = ("right", "went on", "failed", "refused", "wrong")
_HEAD = """# What random cells, models and faults have found

{trials} trials, each in a fresh session, of {acts} cells and calls; {wrong} trials with a finding.
{where}. Written by `make trials`; `python -m tests.random --only SEED` runs one again and shows it.

- **right**: every value on every rank is that of one process.
- **went on**: the same, though a fault struck: the cell was run again.
- **failed**: the cell ended with its cause, and every rank holds what it should.
- **refused**: it uses state that was lost with a rank, and says so.
- **wrong**: none of these; the findings are listed below.
"""


def read(path: Path) -> list[dict[str, Any]]:
    """Return the trials in a file of JSON lines, the newest of each seed."""
    if not path.exists():
        return []
    lines = (json.loads(line) for line in path.read_text().splitlines() if line.strip())
    return sorted({trial["seed"]: trial for trial in lines}.values(), key=lambda t: t["seed"])


def table(trials: Iterable[Mapping[str, Any]], where: str) -> str:
    """Return the totals as markdown."""
    trials = list(trials)
    rows = [row for trial in trials for row in trial["rows"]]
    wrong = [trial for trial in trials if trial["findings"]]
    head = _HEAD.format(trials=len(trials), acts=len(rows), wrong=len(wrong), where=where)
    struck = [row for row in rows if row["fault"] != "none"]
    trained = [row for row in rows if row["act"] == "train"]
    parts = [
        head,
        _counted("fault", rows, "fault"),
        _counted("layout of what was trained", trained, "layout"),
        _counted("the same, where a fault struck", [r for r in struck if r in trained], "layout"),
    ]
    if wrong:
        parts.append("| seed | findings |\n| --- | --- |")
        for trial in wrong:
            kinds = Counter(finding["kind"] for finding in trial["findings"])
            parts[-1] += f"\n| {trial['seed']} | {', '.join(map(_times, kinds.items()))} |"
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def here() -> str:
    """Return the date, the commit and the machine, for the table's head."""
    told = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        check=False,
    )
    torch = importlib.metadata.version("torch")
    cores = os.cpu_count()
    return (
        f"{date.today()}, commit {told.stdout.strip() or 'unknown'}, {cores} cores of {_cpu()}, "
        f"Python {platform.python_version()}, torch {torch}, gloo"
    )


def _counted(title: str, rows: Iterable[Mapping[str, Any]], key: str) -> str:
    counts: dict[str, Counter[str]] = {}
    for row in rows:
        if row[key]:
            counts.setdefault(row[key], Counter())[row["outcome"]] += 1
    lines = [f"| {title} | all | {' | '.join(_OUTCOMES)} |", "| --- " * (len(_OUTCOMES) + 2) + "|"]
    for name, count in sorted(counts.items(), key=lambda item: -item[1].total()):
        numbers = " | ".join(str(count[outcome] or "") for outcome in _OUTCOMES)
        lines.append(f"| {name} | {count.total()} | {numbers} |")
    return "\n".join(lines)


def _times(item: tuple[str, int]) -> str:
    kind, count = item
    return kind if count == 1 else f"{kind} ({count})"


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
