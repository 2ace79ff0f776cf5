"""A model that ranks have published: in the run, in the registry, and served by MLflow."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from nbdist.client.tracking.run import Tracker
from nbdist.client.tracking.settings import mlflow_environment
from nbdist.client.tracking.shipping.shipper import sync
from nbdist.shared.wire import PUBLISHED
from tests.group.harness import run_ranks
from tests.tracking.conftest import Ranks, Server, cell, client_of, mlflow_client

pytestmark = pytest.mark.timeout(600)
SERVING_S = 240.0  # a bound that tells a hang; 20 s of work on a free core


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[Any]]:
    folder = tmp_path_factory.mktemp("published")
    found = run_ranks(2, "tests.group.publish_ranks:published", str(folder), "zero3")
    ((told,), expected, _), _ = found
    return told, expected


def copied(told: dict[str, Any], home: Path) -> dict[str, Any]:
    """A folder as a rank leaves it, for a run that will take it."""
    import shutil

    there = home / "models" / Path(told["folder"]).name
    shutil.copytree(told["folder"], there)
    return {**told, "folder": str(there)}


def track(home: Path, uri: str | None, model: dict[str, Any]) -> str:
    """Track a cell that has published; return what the cell says of its run."""
    tracker, ranks = Tracker(home, uri, "nb"), Ranks(2, {PUBLISHED: json.dumps([model])})
    run = tracker.follow(cell(), ranks.telemetry)
    ranks.step(3)
    link = run.finish("finished")
    assert link is not None
    tracker.flush(120)
    tracker.close(5)
    sync(home)
    return link.text


@pytest.mark.slow
def test_a_published_model_is_registered_and_answers_what_the_plain_model_answers(
    home: Path, published: tuple[dict[str, Any], list[Any]]
) -> None:
    told, expected = published
    model = copied(told, home)
    said = track(home, None, model)
    assert "Published with it, once it is in MLflow: models:/small@best." in said
    assert not Path(model["folder"]).exists(), "it was moved, not copied"
    client = client_of(home)
    version = client.get_model_version_by_alias("small", "best")
    assert str(version.version) == "1"
    run = client.get_run(version.run_id)
    assert run.data.tags["nbdist.model"] == "small version 1"
    assert PUBLISHED not in run.data.params
    request = (Path(told["folder"]) / "example.json").read_bytes()
    answer = served(home, f"sqlite:///{home / 'mlflow.db'}", "models:/small@best", request)
    assert flat(answer["predictions"]) == pytest.approx(flat(expected), abs=1e-5)


@pytest.mark.slow
def test_another_version_takes_the_alias_on_a_server(
    server: Server, tmp_path: Path, published: tuple[dict[str, Any], list[Any]]
) -> None:
    told, _ = published
    client = mlflow_client(server.uri)
    for number in (1, 2):
        home = tmp_path / str(number) / ".nbdist"
        track(home, server.uri, copied(told, home) | {"name": "again"})
        version = client.get_model_version_by_alias("again", "best")
        assert str(version.version) == str(number)
        files = {f.path for f in client.list_artifacts(version.run_id, "models")}
        assert len(files) == 1


def served(home: Path, uri: str, model: str, request: bytes) -> dict[str, Any]:
    """Serve a model as its users do, and ask it once."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # MLflow starts uvicorn by its name, as in an environment that is activated.
    scripts = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = mlflow_environment(os.environ) | {"MLFLOW_TRACKING_URI": uri, "PATH": scripts}
    command = [sys.executable, "-m", "mlflow", "models", "serve", "-m", model]
    command += ["--env-manager", "local", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--workers", "1"]
    log = home / "serve.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=environment, start_new_session=True
        )
    try:
        deadline = time.monotonic() + SERVING_S
        while True:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            try:
                return ask(port, request)
            except urllib.error.HTTPError as error:
                pytest.fail(f"{error}: {error.read()!r}\n{log.read_text()}")
            except OSError:
                time.sleep(0.2)
    finally:
        os.killpg(process.pid, 9)
        process.wait(10)


def ask(port: int, request: bytes) -> dict[str, Any]:
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}/invocations",
        request,
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(asked, timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def flat(nested: Any) -> list[float]:
    return [x for part in nested for x in flat(part)] if isinstance(nested, list) else [nested]
