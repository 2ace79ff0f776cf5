"""Two ranks for all trainings of a module: a cell each, as in a notebook that trains many."""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import nbdist
from tests.groups import tests_below

ROOT = Path(__file__).resolve().parents[2]
FORGET = """
_first = {"In", "Out", "device", "dist", "exit", "get_ipython", "local_rank", "nbdist", "open",
          "quit", "rank", "torch", "world_size"}
for _name in [name for name in globals() if name[0] != "_" and name not in _first]:
    del globals()[_name]
import gc; _ = gc.collect()
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in tests_below(__file__, items):
        # Sockets of tornado and asyncio warn of each other's deprecations.
        for category in ("DeprecationWarning", "FutureWarning", "ResourceWarning"):
            item.add_marker(pytest.mark.filterwarnings(f"ignore::{category}"))


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[nbdist.Session]:
    folder = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.chdir(folder)
        patch.setenv("PYTHONPATH", str(ROOT))
        # Nothing here may need a network.
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_HOME", str(folder / "hf"))
        with nbdist.start(n=2, device="cpu") as session:
            yield session


Said = Callable[[str], dict[str, str]]


@pytest.fixture
def said(session: nbdist.Session) -> Iterator[Said]:
    """A function that trains in a cell, and returns what rules have said of it, by rule."""

    def train(code: str) -> dict[str, str]:
        session.run(code, track=False)
        checks = session.checks()
        assert not checks.failed
        return dict(checks.found)

    yield train
    session.run(FORGET, track=False)
