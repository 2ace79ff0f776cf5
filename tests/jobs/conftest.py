"""The tools that job files are for, in an environment of their own: `make test-jobs` makes it."""

import os
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.groups import ROOT

PYTHON = ROOT / ".venv-jobs" / "bin" / "python"


@pytest.fixture(scope="session")
def python() -> Path:
    """Return the Python that has Ray, Spark, SkyPilot, ..."""
    if not PYTHON.exists():
        pytest.skip("the tools of job files are not installed (make test-jobs)")
    return PYTHON


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail what is skipped where NBDIST_REQUIRE_JOBS=1 says that nothing may be."""
    report = yield
    if report.skipped and os.environ.get("NBDIST_REQUIRE_JOBS") == "1":
        report.outcome = "failed"
        report.longrepr = f"skipped, which NBDIST_REQUIRE_JOBS=1 forbids: {report.longrepr}"
    return report
