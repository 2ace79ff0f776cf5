"""The pytest plugin (entry point `pytest11`): `pytest --nbdist notebooks/`.

Without --nbdist it does nothing and imports nothing; nbval's --nbval goes beside it.
"""

import argparse
import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest

from nbdist.shared.errors import install

_NEEDED = ("jupyter_client", "nbclient", "nbformat")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options; each begins with --nbdist."""
    group = parser.getgroup("nbdist", "notebooks as tests (nbdist)")
    group.addoption(
        "--nbdist",
        action="store_true",
        dest="nbdist",
        help="collect notebooks, and run each in a kernel, on CPU ranks",
    )
    group.addoption(
        "--nbdist-ranks",
        type=_ranks,
        dest="nbdist_ranks",
        metavar="N",
        help="number of ranks, instead of what %%dist start says",
    )
    group.addoption(
        "--nbdist-cell-timeout",
        type=_seconds,
        default=300.0,
        dest="nbdist_cell_timeout",
        metavar="SECONDS",
        help="longest time of a cell (default: 300)",
    )
    group.addoption(
        "--nbdist-artifacts",
        type=Path,
        dest="nbdist_artifacts",
        metavar="DIR",
        help="keep the executed notebooks and the pictures of their boards there",
    )
    group.addoption(
        "--nbdist-baseline",
        action="store_true",
        dest="nbdist_writes_baseline",
        help="write the runs that %%dist expect compares with, beside each notebook",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Refuse what cannot work; make the folder of the artifacts an absolute path."""
    option = config.option
    given = option.nbdist_ranks is not None or option.nbdist_artifacts is not None
    if not option.nbdist and (given or option.nbdist_writes_baseline):
        raise pytest.UsageError("--nbdist-... says how notebooks run: add --nbdist to run them.")
    if not option.nbdist:
        return
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise pytest.UsageError(f"--nbdist needs {' and '.join(missing)}: {install('notebooks')}")
    if option.nbdist_artifacts is not None:
        option.nbdist_artifacts = option.nbdist_artifacts.absolute()


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Return a notebook as a file of tests; None for other files, and without --nbdist."""
    option = parent.config.option
    if not option.nbdist or file_path.suffix != ".ipynb":
        return None
    kept = option.nbdist_artifacts
    if ".ipynb_checkpoints" in file_path.parts or (kept and file_path.is_relative_to(kept)):
        return None  # copies
    from nbdist.testing.notebook_item import NotebookFile

    return NotebookFile.from_parent(parent, path=file_path)


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say what was not judged, and where artifacts and baselines are."""
    if not config.option.nbdist:
        return
    from nbdist.testing.outcome import NOT_JUDGED

    reports = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]
    noted = [(r, name, value) for r in reports for name, value in r.user_properties]
    unjudged = [(r, line) for r, name, line in noted if name == "expect" and NOT_JUDGED in line]
    if unjudged:
        terminalreporter.section("not judged", yellow=True)
        for report, line in unjudged:
            terminalreporter.line(f"{report.nodeid}: {line}", yellow=True)
    if any(name == "artifact" for _, name, _ in noted):
        terminalreporter.line(f"Boards and executed notebooks: {config.option.nbdist_artifacts}")
    if not config.option.nbdist_writes_baseline:
        return
    if written := sorted(value for _, name, value in noted if name == "baseline"):
        terminalreporter.line(f"Baselines were written: commit {', '.join(written)}")
    elif any(name == "cells" and report.passed for report, name, _ in noted):
        terminalreporter.line(
            "No baseline was written: no %dist expect compares a run with another one."
        )


def _ranks(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"takes a number of ranks, at least 1, not {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text.removesuffix("s"))
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"takes a number of seconds above 0, not {text!r}")
    return seconds
