"""Four hosts for all these tests, and four with Slurm; without these, all is skipped or fails."""

from collections.abc import Generator, Iterator

import pytest

from tests.hosts import requirements
from tests.hosts.bed import Bed
from tests.hosts.slurm import Slurm


@pytest.fixture(scope="package")
def shared_bed() -> Iterator[Bed]:
    if why := requirements.missing():
        pytest.skip(why)
    with Bed() as bed:
        yield bed


@pytest.fixture
def bed(shared_bed: Bed) -> Bed:
    """Return the hosts a, b, c and d, healthy, with nothing left running."""
    shared_bed.reset()
    return shared_bed


@pytest.fixture(scope="package")
def shared_slurm() -> Iterator[Slurm]:
    if why := requirements.missing() or requirements.missing_for_slurm():
        pytest.skip(why)
    with Bed() as bed:
        yield Slurm(bed)


@pytest.fixture
def slurm(shared_slurm: Slurm) -> Slurm:
    """Return a Slurm of four idle nodes, a, b, c and d, on hosts of its own; no job is left."""
    shared_slurm.reset()
    return shared_slurm


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail what is skipped where NBDIST_REQUIRE_HOSTS=1 says that nothing may be."""
    report = yield
    if report.skipped and requirements.is_required() and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, which NBDIST_REQUIRE_HOSTS=1 forbids: {report.longrepr}"
    return report
