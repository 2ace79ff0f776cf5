"""`pytest --nbdist` as a person types it: a process, its report, and what it leaves running."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from xml.etree import ElementTree

import psutil

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Report:
    """What a run reported: the exit code, what was printed, and of each notebook a test case."""

    exit_code: int
    text: str
    cases: dict[str, ElementTree.Element]

    def failure(self, notebook: str) -> str:
        """Return the text of a notebook's failure; empty where it passed."""
        failed = self.cases[notebook].find("failure")
        return "" if failed is None else failed.text or ""

    def properties(self, notebook: str, name: str) -> list[str]:
        """Return the values of a property of a notebook's test."""
        every = self.cases[notebook].iter("property")
        return [one.get("value", "") for one in every if one.get("name") == name]


def run_pytest(folder: Path, *words: str, timeout_s: float = 1200.0) -> Report:
    """Run pytest in a folder that is a project of its own, with temp files of its own."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    temp = folder / "temp"
    temp.mkdir(exist_ok=True)
    installed = entry_points(group="pytest11", name="nbdist")
    plugin = () if installed else ("-p", "nbdist.testing.plugin")
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plugin, "--junitxml=report.xml", *words],
        cwd=folder,
        env={**kept, "PYTHONPATH": path, "TMPDIR": str(temp), "IPYTHONDIR": f"{temp}/ipython"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    report = folder / "report.xml"
    cases = ElementTree.parse(report).iter("testcase") if report.exists() else ()
    by_name = {case.get("classname", "").removesuffix(".ipynb"): case for case in cases}
    return Report(done.returncode, done.stdout + done.stderr, by_name)


def left_running(folder: Path) -> Iterator[str]:
    """Yield a line for each process that has the temp files of a run in this folder."""
    temp = str(folder / "temp")
    for process in psutil.process_iter():
        try:
            is_ours = process.environ().get("TMPDIR") == temp
            if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                yield f"{process.pid} {' '.join(process.cmdline())[:150]}"
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
