"""Real MLflow stores and servers for the tracker's tests.

Making MLflow's tables takes seconds: it is done once, and every test gets a copy of the file.
"""

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nbdist.client.metrics.telemetry import CellInfo, Telemetry
from nbdist.client.tracking.settings import mlflow_environment, own_database
from nbdist.shared.wire import Batch, Record
from tests.groups import tests_below

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ["GIT_PYTHON_REFRESH"] = "quiet"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in tests_below(__file__, items):
        # MLflow's own imports warn of other people's deprecations.
        for category in ("DeprecationWarning", "FutureWarning", "UserWarning"):
            item.add_marker(pytest.mark.filterwarnings(f"ignore::{category}"))


@pytest.fixture(scope="session")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow database with its tables and without runs, made in a process of its own."""
    path = tmp_path_factory.mktemp("template") / "mlflow.db"
    code = f"import mlflow; mlflow.MlflowClient('sqlite:///{path}').search_experiments()"
    subprocess.run(
        [sys.executable, "-c", code],
        env=mlflow_environment(os.environ),
        check=True,
        timeout=100,
        capture_output=True,
    )
    return path


@pytest.fixture(scope="session")
def make_home(database: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """Make a private folder whose database is ready."""

    def make() -> Path:
        home = tmp_path_factory.mktemp("notebook") / ".nbdist"
        home.mkdir(mode=0o700)
        shutil.copy(database, home / "mlflow.db")
        return home

    return make


@pytest.fixture
def home(make_home: Callable[[], Path]) -> Path:
    return make_home()


def mlflow_client(uri: str) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(uri)


def client_of(home: Path) -> Any:
    return mlflow_client(own_database(home))


def cell(number: int = 3, ranks: int = 2, **changes: Any) -> CellInfo:
    fields: dict[str, Any] = {
        "number": number,
        "source": "loss.backward()\nopt.step()\n",
        "ranks": tuple(range(ranks)),
        "world_size": ranks,
        "backend": "gloo",
        "devices": ("cpu",) * ranks,
    }
    return CellInfo(**(fields | changes))


class Ranks:
    """Stands where the ranks stand: sends records into a real Telemetry."""

    def __init__(self, n: int, facts: dict[str, str] | None = None) -> None:
        self.telemetry = Telemetry()
        self._n = n
        self._facts = facts or {}
        self._step = 0
        self._began_ns = time.time_ns()
        self.points = 0

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self._step += 1
            for rank in range(self._n):
                values = {
                    "loss": 1 / self._step + rank,
                    "step_s": 0.01,
                    "comm_s": 0.001 * rank,
                    "samples": 32.0,
                }
                moment_ns = self._began_ns + 10_000_000 * self._step  # as long as it says it takes
                record = Record(rank, self._step - 1, "step", self._step, moment_ns, values)
                facts = self._facts if self._step == 1 else {}
                self.telemetry.receive(Batch(rank, (record,), facts))

    def log(self, **values: float) -> None:
        record = Record(0, 1_000_000 + self._step, "log", self._step, time.time_ns(), values)
        self.telemetry.receive(Batch(0, (record,)))


class Server:
    """A real `mlflow server` on loopback that can be killed and started again on its port."""

    def __init__(self, folder: Path, *options: str, **environment: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._options, self._environment = options, environment
        self.uri = f"http://127.0.0.1:{self._port}"
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        environment = mlflow_environment(os.environ, self._environment)
        environment["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1"]
        command += ["--port", str(self._port), "--workers", "1"]
        command += ["--backend-store-uri", f"sqlite:///{self._folder}/mlflow.db"]
        command += ["--artifacts-destination", str(self._folder / "artifacts"), *self._options]
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env=environment,
                cwd=self._folder,
                start_new_session=True,
            )
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            assert self._process.poll() is None, (self._folder / "server.log").read_text()
            try:
                with urllib.request.urlopen(f"{self.uri}/health", timeout=2):
                    return
            except OSError:
                time.sleep(0.2)
        pytest.fail("the MLflow server did not come up within 60 s")

    def kill(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, 9)
            self._process.wait(10)
            self._process = None


@pytest.fixture(scope="module")
def server(make_home: Callable[[], Path]) -> Iterator[Server]:
    server = Server(make_home())
    server.start()
    yield server
    server.kill()
