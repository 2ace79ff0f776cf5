"""Sockets, files and environments: what another user of this machine can reach, see and read."""

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.lifecycle.kernels import Family, Notebook, listening

SECRETS = {
    name: f"s3cret-{number}"
    for number, name in enumerate(
        (
            "JPY_API_TOKEN",
            "JUPYTER_TOKEN",
            "JUPYTERHUB_API_TOKEN",
            "MLFLOW_TRACKING_USERNAME",
            "MLFLOW_TRACKING_PASSWORD",
            "MLFLOW_TRACKING_TOKEN",
        )
    )
}


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    # A umask that gives everything to everybody shows whose modes are chosen.
    before = os.umask(0)
    folder = tmp_path_factory.mktemp("secrets")
    try:
        with Notebook(folder, **SECRETS) as notebook:
            notebook.start()
            said = notebook.on_ranks("nbdist.log(loss=1.0)\ndist.barrier()\nprint('x')")
            assert "Error" not in said, said
            assert "MLflow" in notebook.run("%dist ui")
            yield notebook
    finally:
        os.umask(before)


@pytest.fixture(scope="module")
def family(notebook: Notebook) -> list[psutil.Process]:
    """Every process of the notebook: ranks, hosts, shipping process and MLflow's UI."""
    processes = Family(notebook.pid).processes
    commands = " ".join(" ".join(p.cmdline()) for p in processes)
    assert "tracking.ship" in commands
    assert "mlflow server" in commands
    return processes


@pytest.fixture(scope="module")
def keys(notebook: Notebook) -> list[str]:
    """What signs the messages between notebook and ranks."""
    files = list((notebook.keys[0] / "security").glob("*.json"))
    found = {json.loads(file.read_text())["key"] for file in files}
    assert len(files) == 2
    assert all(len(key) >= 32 for key in found)
    return [*found, *SECRETS.values()]


def test_every_socket_that_listens_is_on_loopback(family: list[psutil.Process]) -> None:
    sockets = listening(family)
    assert len(sockets) > 10
    assert {address for _, address, _ in sockets} == {"127.0.0.1"}


def test_the_parent_listens_on_nothing(notebook: Notebook) -> None:
    assert listening([psutil.Process(notebook.pids()["parent"])]) == []


def test_folders_and_files_are_their_owners_alone(notebook: Notebook) -> None:
    opened = [
        f"{stat.S_IMODE(path.stat().st_mode):o} {path}"
        for top in (notebook.folder / ".nbdist", notebook.keys[0])
        for path in (top, *top.rglob("*"))
        if path.stat().st_mode & 0o077
    ]
    # Folders that nobody else may enter protect what lies in them; the keys are protected twice.
    exposed = [line for line in opened if not _is_enclosed(Path(line.split(" ", 1)[1]))]
    assert exposed == []
    assert not [line for line in opened if "/security" in line]
    logs = notebook.folder / ".nbdist" / "logs"
    assert not [line for line in opened if str(logs) in line]


def _is_enclosed(path: Path) -> bool:
    """Return whether a folder above `path`, below the test's own, lets nobody else in."""
    return any(
        stat.S_IMODE(folder.stat().st_mode) == 0o700
        for folder in path.parents
        if folder.name == ".nbdist" or folder.name.startswith("nbdist-")
    )


def test_no_secret_stands_in_the_environment_of_a_rank_or_of_its_hosts(
    notebook: Notebook, keys: list[str]
) -> None:
    for name, pid in notebook.pids().items():
        text = Path(f"/proc/{pid}/environ").read_text(errors="replace")
        assert not [key for key in keys if key in text], name
    said = notebook.on_ranks("import os\nprint('\\n'.join(map(repr, os.environ.items())))")
    assert not [key for key in (*keys, *SECRETS) if key in said]


def test_no_secret_stands_on_a_command_line_or_in_a_log(
    notebook: Notebook, family: list[psutil.Process], keys: list[str]
) -> None:
    for process in family:
        assert not [key for key in keys if key in " ".join(process.cmdline())], process
    files = [path for path in (notebook.folder / ".nbdist").rglob("*") if path.is_file()]
    assert any(path.name == "controller.log" for path in files)
    for path in files:
        text = path.read_bytes()
        assert not [key for key in keys if key.encode() in text], path


def test_a_message_with_a_wrong_signature_is_refused(notebook: Notebook) -> None:
    said = notebook.run(
        "import json, pathlib, threading\n"
        "from nbdist.client.cluster.connection import Connection\n"
        "from nbdist.client.notebook import current\n"
        "source = current._current._cluster._folder.connection_file('client')\n"
        "forged = json.loads(source.read_text()); forged['key'] = 'wrong-' * 8\n"
        "file = pathlib.Path('forged.json'); file.write_text(json.dumps(forged))\n"
        "try:\n"
        "    Connection(file, timeout_s=3)\n"
        "    print('connected')\n"
        "except Exception as error:\n"
        "    print('refused', type(error).__name__)\n"
    )
    assert "refused" in said


def test_a_forged_cell_is_not_run(notebook: Notebook) -> None:
    said = notebook.run(
        "connection = nbdist.client.notebook.current._current._cluster._connection\n"
        "real, session = connection._client.session.key, connection._client.session\n"
        "marker = pathlib.Path('forged-cell').absolute()\n"
        "content = {'code': f'open({str(marker)!r}, \"w\")', 'silent': False,\n"
        "           'store_history': False, 'user_expressions': {}, 'allow_stdin': False}\n"
        "done = threading.Event()\n"
        "def forge():\n"
        "    message = session.msg('execute_request', content=content)\n"
        "    session.key = b'wrong-' * 8\n"
        "    session.send(connection._client._mux_socket, message,\n"
        "                 ident=connection._client._engines[0].encode())\n"
        "    session.key = real\n"
        "    done.set()\n"
        "connection._client._io_loop.add_callback(forge)\n"
        "print(done.wait(30))\n"
    )
    assert "True" in said, said
    # Cells of one rank run in order: after this one, the forged one would have run.
    assert "after" in notebook.on_ranks("print('after')")
    assert not (notebook.folder / "forged-cell").exists()
    log = "".join(p.read_text() for p in (notebook.folder / ".nbdist" / "logs").rglob("rank-0.log"))
    assert "nvalid" in log or "ignature" in log, log
