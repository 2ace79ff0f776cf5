"""A server that asks who is there: user and password, a token, and where these never stand."""

import base64
import http.server
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nbdist.client.cluster.launchers.helper_process import rank_environment
from nbdist.client.tracking.past.runs import runs
from nbdist.client.tracking.run import Tracker
from nbdist.client.tracking.shipping.shipper import sync
from tests.tracking.conftest import Ranks, Server, cell
from tests.tracking.test_embedded import wait_for

pytestmark = pytest.mark.timeout(300)  # MLflow's accounts start slowly, and hash slowly

PASSWORD = "correct-horse-battery"
TOKEN = "nbdist-test-token-0123456789"


@pytest.fixture(scope="module")
def guarded(make_home: Callable[[], Path]) -> Iterator[Server]:
    """A real `mlflow server --app-name basic-auth`."""
    pytest.importorskip("flask_wtf", reason="MLflow's own accounts need Flask-WTF")
    home = make_home()
    settings = home / "auth.ini"
    settings.write_text(
        f"[mlflow]\ndefault_permission = READ\ndatabase_uri = sqlite:///{home}/auth.db\n"
        f"admin_username = admin\nadmin_password = {PASSWORD}\n"
        "authorization_function = mlflow.server.auth:authenticate_request_basic_auth\n"
    )
    server = Server(
        home,
        "--app-name",
        "basic-auth",
        MLFLOW_AUTH_CONFIG_PATH=str(settings),
        MLFLOW_FLASK_SERVER_SECRET_KEY="for these tests",
    )
    server.start()
    yield server
    server.kill()


def train(home: Path, uri: str, name: str) -> Tracker:
    tracker, ranks = Tracker(home, uri, "guarded"), Ranks(2)
    run = tracker.follow(cell(run_name=name), ranks.telemetry)
    ranks.step(20)
    assert run.finish("finished") is not None
    return tracker


def processes_say(secret: str) -> bool:
    """Return whether any process of this machine has `secret` on its command line."""
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            if secret.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                return True
        except OSError:
            continue  # it has ended
    return False


def assert_written_nowhere(home: Path, secret: str) -> None:
    assert not processes_say(secret)
    for path in home.rglob("*"):
        if path.is_file():
            assert secret.encode() not in path.read_bytes(), path


@pytest.mark.slow
def test_a_run_waits_for_the_right_password_and_is_then_sent(
    guarded: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / ".nbdist"
    tracker = train(home, guarded.uri, "locked-out")
    refused = "401: unknown user, password or token"
    wait_for(lambda: runs(home)[0].waits_for.startswith(refused), 60)
    tracker.close(1)
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "admin")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "wrong-horse-battery")
    said = sync(home)
    assert said.startswith(
        f"Kept in .nbdist/spool: 1 run, because MLflow did not accept all of it ({refused}"
    )
    assert "wrong-horse" not in said
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", PASSWORD)
    assert sync(home).startswith("1 run sent to MLflow")
    assert_written_nowhere(home, PASSWORD)
    assert PASSWORD not in str(rank_environment(os.environ))


@pytest.mark.slow
def test_a_password_in_the_uri_opens_the_server_and_is_written_nowhere(
    guarded: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / ".nbdist"
    whole = guarded.uri.replace("http://", f"http://admin:{PASSWORD}@")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", whole)
    tracker = train(home, whole, "named")
    assert tracker.flush(60), (home / "logs/tracking.log").read_text()
    assert_written_nowhere(home, PASSWORD)
    tracker.close(5)
    assert runs(home)[0].uri == guarded.uri
    assert PASSWORD not in str(rank_environment(os.environ))


class Gate(http.server.BaseHTTPRequestHandler):
    """A reverse proxy that wants a bearer's token, as managed MLflow servers do."""

    behind = ""

    def _pass_on(self) -> None:
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            self.send_error(401)
            return
        size = int(self.headers["Content-Length"] or 0)
        request = urllib.request.Request(
            self.behind + self.path, self.rfile.read(size) or None, method=self.command
        )
        if kind := self.headers["Content-Type"]:
            request.add_header("Content-Type", kind)
        if self.behind_password:
            request.add_header("Authorization", self.behind_password)
        try:
            answer = urllib.request.urlopen(request, timeout=30)
        except urllib.error.HTTPError as error:
            answer = error
        body = answer.read()
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.headers["Content-Type"] or "")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _pass_on
    behind_password = "Basic " + base64.b64encode(f"admin:{PASSWORD}".encode()).decode()

    def log_message(self, format: str, *words: object) -> None:
        pass


@pytest.mark.slow
def test_a_token_opens_a_server_behind_a_gate_and_is_written_nowhere(
    guarded: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Gate, "behind", guarded.uri)
    home = tmp_path / ".nbdist"
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Gate) as gate:
        thread = threading.Thread(target=gate.serve_forever)
        thread.start()
        try:
            uri = f"http://127.0.0.1:{gate.server_port}"
            tracker = train(home, uri, "by-token")
            wait_for(lambda: "401" in runs(home)[0].waits_for, 60)
            tracker.close(1)
            monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", TOKEN)
            assert sync(home).startswith("1 run sent to MLflow")
        finally:
            gate.shutdown()
            thread.join(30)
    assert runs(home)[0].is_sent
    assert_written_nowhere(home, TOKEN)
    assert TOKEN not in str(rank_environment(os.environ))
