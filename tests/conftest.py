"""What every test shares."""

import logging
import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests import groups

# A test says what is true, and not how long it may take: the cores are shared. `CI` sets it, too.
settings.register_profile(
    "nbdist", deadline=None, suppress_health_check=[HealthCheck.too_slow], parent=settings.default
)


def pytest_configure(config: pytest.Config) -> None:
    """Let the groups' hooks see the notebooks too, and Ctrl-C be Ctrl-C."""
    # A shell starts its background jobs with SIGINT ignored, and Python keeps it so.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if "CI" not in os.environ:
        settings.load_profile("nbdist")
    config.pluginmanager.register(groups, "nbdist-groups")


@pytest.fixture(autouse=True)
def _priority_is_kept() -> Iterator[None]:
    """Fail a test that lowers the worker's priority: all that it starts from then on is slow."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    yield
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


@pytest.fixture
def caplog(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    """Hear what nbdist logs also after a cluster was started here, which keeps it in a file."""
    monkeypatch.setattr(logging.getLogger("nbdist"), "propagate", True)
    return caplog


@pytest.fixture(scope="session")
def chromium() -> str:
    """Return the path of the browser; tests that ask for it carry `@pytest.mark.browser`."""
    path = groups.find_chromium()
    if path is None:
        pytest.skip("no Chromium on this machine (Debian: apt install chromium)")
    return path
