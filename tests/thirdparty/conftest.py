"""Two ranks for all libraries; every test leaves them as it found them, which is checked."""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import nbdist
from nbdist.client.tracking.past.runs import RunRow, runs
from tests.groups import tests_below
from tests.lifecycle.kernels import wait_for
from tests.thirdparty import task

ROOT = Path(__file__).resolve().parents[2]

_STATE = """
import os, sys
_x = torch.ones(1) * (rank + 1)
dist.all_reduce(_x)
{
    "sum": _x.item(), "backend": dist.get_backend(), "size": dist.get_world_size(),
    "ps1": hasattr(sys, "ps1"), "group": id(dist.group.WORLD), "threads": torch.get_num_threads(),
    "environment": {k: v for k, v in os.environ.items() if k.split("_")[0] in (
        "RANK", "WORLD", "LOCAL", "GROUP", "ROLE", "MASTER", "TORCHELASTIC", "ACCELERATE", "OMP")},
}
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in tests_below(__file__, items):
        # Sockets of tornado and asyncio warn of each other's deprecations.
        for category in ("DeprecationWarning", "FutureWarning", "ResourceWarning"):
            item.add_marker(pytest.mark.filterwarnings(f"ignore::{category}"))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[nbdist.Session]:
    folder = tmp_path_factory.mktemp("thirdparty")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.chdir(folder)
        patch.setenv("PYTHONPATH", str(ROOT))
        # Nothing here may need a network.
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_HOME", str(folder / "hf"))
        session = nbdist.start(n=2, device="cpu")
    with session:
        session.run(Path(task.__file__).read_text(), track=False)
        yield session


@pytest.fixture
def session(shared: nbdist.Session) -> Iterator[nbdist.Session]:
    """The two ranks. Afterwards group and environment must be as before."""
    before = state(shared)
    assert [s["sum"] for s in before] == [3.0, 3.0]
    yield shared
    assert state(shared) == before


def state(session: nbdist.Session) -> list[Any]:
    """Return what a library might have changed on each rank."""
    values: list[Any] = session.run(_STATE, track=False).value_list
    assert all(isinstance(value, dict) for value in values), values
    return values


@pytest.fixture
def newest_run(session: nbdist.Session) -> Callable[[], RunRow]:
    """Return a function that returns the newest run, once it has ended."""
    folder = session._showing.folder

    def newest() -> RunRow:
        wait_for(lambda: runs(folder)[0].state != "running", "the run's end")
        return runs(folder)[0]

    return newest
