"""A pytest plugin: groups of tests, their order and times; skips and crashes nobody overlooks.

A test belongs to the group its folder names (tests/unit, tests/cluster, ...); the cells of the
notebooks are the group `notebooks`. One pytest runs them all, so that its last line counts all.
`make test` gives it two workers (pytest-xdist), for tests wait about half of their time; `-n 0`
runs one test after the other, as a debugger needs it.

The hooks of a conftest.py hold for its own folder; conftest.py registers this module, so that
they hold for notebooks/ too.
"""

import fcntl
import os
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.covering import covering
from tests.group.last_words import crash_file

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"

# The order of the groups. Unit tests need a process that has started no other yet. Then what one
# worker runs alone comes early, and files fill the gaps; folders not named here come after these,
# and last what measures: one worker runs it, each test while the other runs none (`_cores_of`).
_ORDER = (
    "unit",
    "cluster",
    "notebooks",
    "lifecycle",
    "testing",
    "tracking",
    "group",
    "packaging",
)
_LAST = "measured"

# What one worker runs alone, in order; of all else it is given a file at a time. Notebooks keep
# their runs in one folder, and the tests of cluster/ share a cluster; the longest file of them has
# one of its own, and another worker. What lets the kernel end a
# process for its memory is with these: where cgroups nest, the counter of others' processes rises
# with its own, and a rank that is killed in that moment would be taken for another such.
_SHARES = {
    "unit": "unit",
    "cluster/test_half_steps.py": "half steps",
    "cluster": "cluster",
    "notebooks": "notebooks",
    "measured": "measured",
    "lifecycle/test_out_of_memory.py": "cluster",
}

# Left to `make test-all`, as a whole run must end within the hour on two slow cores. Each of these
# files costs half a minute or more there, for many ways of what other files prove in one.
_LEFT_TO_ALL = {
    *(f"notebooks/{name}.ipynb" for name in (
        "03_fsdp_language_model", "06_every_layout", "07_slow_networks", "09_data_at_scale",
        "10_which_step_went_wrong", "13_fine_tune_a_language_model",
    )),
    *(f"tests/cluster/test_{name}.py" for name in (
        "checkpoint_option", "diff", "kept_steps", "peers", "retry", "scaling", "sweep",
    )),
    *(f"tests/group/test_{name}.py" for name in (
        "adapters", "checkpoint_s3", "compile", "context", "crossings", "factory", "generate",
        "listed_experts", "noise", "parity", "parts", "quantized_base", "reshard", "tensor_kinds",
        "transformer",
    )),
    "tests/export/test_notebooks.py",
    "tests/lifecycle/test_secrets.py",
    "tests/random/test_random.py",
    "tests/testing/test_notebooks.py",
    "tests/thirdparty/test_trl.py",
}  # fmt: skip

# A cell of a notebook may take 300 s (--nbval-cell-timeout); nbval then interrupts it in an
# orderly way, and pytest-timeout is only there for the case that it cannot.
_NOTEBOOK_CELL_TIMEOUT_S = 360

# Of a rank's process, as `tests/group/last_words` says it.
CRASHED = r"process (\d+) was killed by SIG(?:ABRT|BUS|FPE|ILL|SEGV)"

_seconds: defaultdict[str, float] = defaultdict(float)
_counts: Counter[str] = Counter()


@cache
def group_of(path: Path) -> str:
    """Return the group of the test file or notebook at `path`."""
    if path.suffix == ".ipynb":
        return "notebooks"
    if path.is_relative_to(TESTS) and path.parent != TESTS:
        return path.relative_to(TESTS).parts[0]
    return "other"


def tests_below(conftest: str, items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the tests in the folder of a conftest.py, whose hooks are given all there are."""
    folder = str(Path(conftest).parent) + os.sep
    return [item for item in items if str(item.path).startswith(folder)]


def _place(group: str) -> int:
    if group == _LAST:
        return len(_ORDER) + 1
    return _ORDER.index(group) if group in _ORDER else len(_ORDER)


def find_chromium() -> str | None:
    """Return the path of a Chromium or Chrome on this machine, or None."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


def _has_nvidia_gpu() -> bool:
    return Path("/dev/nvidia0").exists() or Path("/dev/dxg").exists()


@pytest.hookimpl(tryfirst=True)  # before pytest deselects what is slow
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the groups in order, and skip what this machine cannot run."""
    for item in items:
        if (
            item.path.is_relative_to(ROOT)
            and item.path.relative_to(ROOT).as_posix() in _LEFT_TO_ALL
        ):
            item.add_marker(pytest.mark.slow)
    _mark_rest_of_matrices(items)
    items.sort(key=lambda item: _place(group_of(item.path)))  # stable: cells keep their order
    for item in items:
        if item.path.suffix == ".ipynb":
            item.add_marker(pytest.mark.timeout(_NOTEBOOK_CELL_TIMEOUT_S))
        if item.get_closest_marker("browser") and find_chromium() is None:
            reason = "no Chromium on this machine (Debian: apt install chromium)"
            item.add_marker(pytest.mark.skip(reason=reason))
        if item.get_closest_marker("gpu") and not _has_nvidia_gpu():
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU on this machine"))


def _mark_rest_of_matrices(items: list[pytest.Item]) -> None:
    """Mark as slow what of a matrix is not in its covering sample.

    A test that starts processes is one if several decorators give its parameters.
    """
    matrices: defaultdict[str, dict[tuple[str, ...], pytest.Item]] = defaultdict(dict)
    for item in items:
        is_product = (
            group_of(item.path) != "unit" and sum(1 for _ in item.iter_markers("parametrize")) > 1
        )
        if item.get_closest_marker("matrix") or (
            is_product and not item.get_closest_marker("slow")
        ):
            assert isinstance(item, pytest.Function)
            values = tuple(map(repr, item.callspec.params.values()))
            matrices[item.nodeid.partition("[")[0]][values] = item
    for matrix in matrices.values():
        for case in matrix.keys() - set(covering(matrix)):
            matrix[case].add_marker(pytest.mark.slow)


def share_of(nodeid: str) -> str:
    """Return the name of what is run by the same worker as this test."""
    file = nodeid.split("::")[0]
    path = file.removeprefix("tests/")
    return _SHARES.get(path) or _SHARES.get(group_of(ROOT / file), file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give the workers whole shares, in the order of the groups."""
    from xdist.scheduler import LoadScopeScheduling

    config.option.loadscopereorder = False

    class Shares(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return share_of(nodeid)

    return Shares(config, log)


@contextmanager
def _cores_of(item: pytest.Item) -> Iterator[None]:
    """Let what measures run while no other worker runs a test; it waits for that."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    with open(__file__, "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if group_of(item.path) == _LAST else fcntl.LOCK_SH)
        try:
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # processes that the test has forked hold it, too


# The first, so that no timeout counts the wait.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Give what measures the cores, and notebooks the static display, equal in every run.

    nbval starts a notebook's kernel, which inherits this, when its first cell is set up.
    """
    with _cores_of(item), pytest.MonkeyPatch.context() as patch:
        if item.path.suffix != ".ipynb":
            return (yield)
        patch.setenv("NBDIST_STATIC", "1")
        # Jupyter looks for its kernels beside the Python that runs the tests.
        patch.setenv("JUPYTER_PREFER_ENV_PATH", "1")
        return (yield)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add up the time of each group, fixtures included."""
    group = group_of(ROOT / report.nodeid.split("::")[0])
    _seconds[group] += report.duration
    _counts[group] += report.when == "call"


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was skipped, what has crashed and was run again, and where the time went."""
    skipped = terminalreporter.stats.get("skipped", [])
    if skipped:
        terminalreporter.section(f"{len(skipped)} SKIPPED: NOT TESTED ON THIS MACHINE", yellow=True)
        for report in skipped:
            terminalreporter.line(f"{report.nodeid}: {_reason(report)}", yellow=True)
    reruns = terminalreporter.stats.get("rerun", [])
    crashes = [(r.nodeid, m[1]) for r in reruns if (m := re.search(CRASHED, r.longreprtext))]
    if crashes:
        terminalreporter.section(f"{len(crashes)} RUN AGAIN: A RANK CRASHED IN C++", red=True)
        for nodeid, pid in crashes:
            terminalreporter.line(f"{nodeid}: see {crash_file(pid)}", red=True)
    if _seconds:
        terminalreporter.section("time of each group")
        for group in sorted(_seconds, key=_place):
            line = f"{group:<12} {_counts[group]:>5} tests {_seconds[group]:>8.1f} s"
            terminalreporter.line(line)
        total = f"{'all':<12} {_counts.total():>5} tests {sum(_seconds.values()):>8.1f} s"
        workers = terminalreporter.config.getoption("numprocesses", None) or 1
        terminalreporter.line(f"{total}   on {os.cpu_count()} cores, workers: {workers}")


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    return str(report.longrepr)
