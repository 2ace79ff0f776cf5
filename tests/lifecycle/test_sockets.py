"""Every socket that listens, who may use it, and what comes of trying to get in.

    | who listens          | what it asks of a caller       | a stranger                        |
    | ipyparallel (kernel  | a signature; off loopback also | commands nothing; on loopback, a  |
    | to ranks)            | CURVE                          | user of this machine can listen   |
    |                      |                                | to iopub, as with Jupyter's own   |
    | the store, gloo      | nothing: the named exception   | reads and changes them            |
    | Jupyter's kernel     | a signature (Jupyter's own)    | as ever                           |

Once on loopback, once on another address of this machine.
"""

import json
import os
import signal
import socket
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq
from jupyter_client.session import Session

from tests.lifecycle.kernels import Family, Notebook, listening

LOOPBACK = "127.0.0.1"
PATIENCE_MS = 700  # what would run, runs within a few milliseconds
WAIT_MS = 60_000  # for what must come, however full the machine is


def another_address() -> str | None:
    """Return an address of this machine that is not loopback."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family == socket.AF_INET and name in up and entry.address[:4] != "127.":
                return entry.address
    return None


@dataclass(frozen=True)
class Cluster:
    """A running cluster, as its owner knows it and as a stranger finds it."""

    notebook: Notebook
    address: str
    facts: dict[str, Any]  # of the controller's file for engines, keys and all
    store_port: int
    gloo_ports: tuple[int, ...]

    @property
    def is_encrypted(self) -> bool:
        return self.address != LOOPBACK

    def family(self) -> list[psutil.Process]:
        return Family(self.notebook.pid).processes

    def ipyparallel_ports(self) -> set[int]:
        ours = {port for _, _, port in listening(self.family())}
        return ours - {self.store_port, *self.gloo_ports}


@pytest.fixture(scope="module", params=["loopback", "another address"])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Cluster]:
    address = LOOPBACK if request.param == "loopback" else another_address()
    if address is None:
        pytest.skip("this machine has no address but loopback's")
    options = "" if address == LOOPBACK else f" --interface {address} --trust-network"
    with Notebook(tmp_path_factory.mktemp("sockets")) as notebook:
        notebook.start(f"-n 2 --device cpu{options}")
        (file,) = notebook.keys[0].glob("security/*engine.json")
        (clients,) = notebook.keys[0].glob("security/*client.json")
        facts = json.loads(file.read_text())
        facts["client_iopub"] = json.loads(clients.read_text())["iopub"]
        store = "nbdist.current().run('import os; int(os.environ[\"MASTER_PORT\"])')"
        port = int(notebook.run(f"print({store}[0].value)"))
        gloo = notebook.run(
            "r = nbdist.current().run('import nbdist.engine.group.state as m; m.here.status()')\n"
            "print([v['gloo_address'] for v in r.value_list])"
        )
        addresses = eval(gloo)
        assert {a.partition(":")[0] for a in addresses} == {address}
        ports = tuple(int(a.partition(":")[2]) for a in addresses)
        yield Cluster(notebook, address, facts, port, ports)


def test_every_socket_that_listens_is_known_and_on_the_chosen_address(cluster: Cluster) -> None:
    pids = {pid: key for key, pid in cluster.notebook.pids().items()}
    found: dict[int, set[str]] = {}
    for pid, address, port in listening(cluster.family()):
        assert address == cluster.address
        owner = pids.get(pid) or pids[os.getsid(pid)]  # the controller's own children
        found.setdefault(port, set()).add(owner)
    assert found.pop(cluster.store_port) == {"store"}
    for rank, port in enumerate(cluster.gloo_ports):
        assert found.pop(port) == {f"rank {rank}"}
    # All others are ipyparallel's.
    assert set(map(frozenset, found.values())) == {frozenset({"controller"})}
    named = {cluster.facts[name] for name in ("registration", "mux", "control", "iopub")}
    assert named <= set(found)


def test_ipyparallels_messages_are_signed_and_off_loopback_encrypted(cluster: Cluster) -> None:
    assert len(cluster.facts["key"]) == 64
    assert cluster.facts["signature_scheme"] == "hmac-sha256"
    assert bool(cluster.facts["curve_serverkey"]) is cluster.is_encrypted


def test_no_key_stands_on_a_command_line_in_an_environment_or_in_a_log(cluster: Cluster) -> None:
    keys = [cluster.facts["key"], cluster.facts["curve_serverkey"] or cluster.facts["key"]]
    for process in [*cluster.family(), psutil.Process(cluster.notebook.pid)]:
        told = " ".join([*process.cmdline(), *process.environ().values()])
        assert not [key for key in keys if key in told], process
    for path in (cluster.notebook.folder / ".nbdist").rglob("*"):
        if path.is_file():
            assert not [key for key in keys if key.encode() in path.read_bytes()], path
    files = list(cluster.notebook.keys[0].glob("security/*-*.json"))
    assert {f"{stat.S_IMODE(file.stat().st_mode):o}" for file in files} == {"600"}
    assert stat.S_IMODE(cluster.notebook.keys[0].stat().st_mode) == 0o700


def test_the_kernels_own_sockets_stay_on_loopback(cluster: Cluster) -> None:
    kernel = psutil.Process(cluster.notebook.pid)
    assert {address for _, address, _ in listening([kernel])} == {LOOPBACK}


class Stranger:
    """Sends to a cluster without its secrets, or with some of them."""

    def __init__(self, cluster: Cluster, *, knows_server: bool = False) -> None:
        self._cluster = cluster
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []  # so that none is collected while it is open
        self._knows_server = knows_server

    def __enter__(self) -> "Stranger":
        return self

    def __exit__(self, *_: object) -> None:
        # Whatever a failed test left open: a mere term() would wait for it, for ever.
        self._context.destroy(linger=0)

    def connect(self, kind: int, port: int) -> zmq.Socket[bytes]:
        """Return a socket that has begun to connect."""
        made = self._socket(kind)
        made.connect(f"tcp://{self._cluster.address}:{port}")
        return made

    def handshakes(self, port: int, timeout_ms: int) -> bool:
        """Return whether a connection is made to the end within `timeout_ms` milliseconds."""
        made = self._socket(zmq.DEALER)
        # First the monitor, then the connection: on loopback it may stand before the next line.
        with made.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED) as events:
            made.connect(f"tcp://{self._cluster.address}:{port}")
            stands = events.poll(timeout_ms) != 0
            made.disable_monitor()
        return stands

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        self._sockets.append(made)
        made.identity = os.urandom(8).hex().encode()
        if self._knows_server and self._cluster.is_encrypted:
            made.curve_publickey, made.curve_secretkey = zmq.curve_keypair()
            made.curve_serverkey = self._cluster.facts["curve_serverkey"].encode()
        return made


def engine_identities(cluster: Cluster) -> list[bytes]:
    said = cluster.notebook.run(
        "print(list(nbdist.current()._cluster._connection.engines().values()))"
    )
    assert said.startswith("["), said
    return [name.encode() for name in eval(said)]


def still_works(cluster: Cluster) -> None:
    said = cluster.notebook.on_ranks("x = torch.ones(1) * (rank + 1)\ndist.all_reduce(x)\nx.item()")
    assert "3.0" in said, said


@pytest.mark.parametrize("key", [b"", b"wrong-" * 8], ids=["unsigned", "wrongly signed"])
def test_a_strangers_cell_runs_nowhere_whatever_port_it_is_sent_to(
    cluster: Cluster, key: bytes
) -> None:
    marker = cluster.notebook.folder / f"got-in-{time.monotonic_ns()}"
    content = {
        "code": f"open({str(marker)!r}, 'w')",
        "silent": False,
        "store_history": False,
        "user_expressions": {},
        "allow_stdin": False,
    }
    engines = engine_identities(cluster)
    # Off loopback the stranger has even got hold of CURVE's public key.
    with Stranger(cluster, knows_server=True) as stranger:
        session = Session(key=key, signature_scheme="hmac-sha256")
        sockets = [stranger.connect(zmq.DEALER, p) for p in sorted(cluster.ipyparallel_ports())]
        poller = zmq.Poller()
        for made in sockets:
            poller.register(made, zmq.POLLIN)
            for engine in engines:
                message = session.msg("execute_request", content=content)
                frames = session.serialize(message, ident=engine)
                try:
                    made.send_multipart(frames, zmq.NOBLOCK)
                except zmq.Again:
                    continue  # a connection that was never made takes no messages
        answered = dict(poller.poll(PATIENCE_MS))
        replies = [made.recv_multipart() for made in answered]
        assert not [r for r in replies if any(b"execute_reply" in part for part in r)]
    still_works(cluster)
    assert not marker.exists()


def test_without_curves_key_no_connection_is_made_off_loopback(cluster: Cluster) -> None:
    port = cluster.facts["registration"]
    with Stranger(cluster) as stranger:
        if cluster.is_encrypted:
            assert not stranger.handshakes(port, PATIENCE_MS)
        else:
            assert stranger.handshakes(port, WAIT_MS)


def test_what_ranks_print_is_heard_by_other_users_on_loopback_alone_as_with_jupyter(
    cluster: Cluster,
) -> None:
    with Stranger(cluster) as stranger:
        made = stranger.connect(zmq.SUB, cluster.facts["client_iopub"])
        made.subscribe(b"")
        made.poll(PATIENCE_MS)
        cluster.notebook.on_ranks("print('overheard')")
        heard = b""
        while made.poll(PATIENCE_MS):
            heard += b"".join(made.recv_multipart())
    assert (b"overheard" in heard) is not cluster.is_encrypted


def test_a_strangers_engine_is_not_registered(cluster: Cluster) -> None:
    with Stranger(cluster, knows_server=True) as stranger:
        made = stranger.connect(zmq.DEALER, cluster.facts["registration"])
        session = Session(key=b"wrong-" * 8, signature_scheme="hmac-sha256")
        content = {"uuid": "stranger", "id": 7}
        session.send(made, "registration_request", content=content)
        assert made.poll(PATIENCE_MS) == 0
    assert len(engine_identities(cluster)) == 2


def test_garbage_on_any_port_of_ipyparallel_stops_nothing(cluster: Cluster) -> None:
    for port in cluster.ipyparallel_ports():
        with socket.create_connection((cluster.address, port), timeout=30) as raw:
            raw.sendall(os.urandom(4096))
    parts: list[list[bytes]] = [[b"<IDS|MSG>", *[b"{"] * 5], [b"x", b"<IDS|MSG>"], [b"x"]]
    engines = engine_identities(cluster)
    # The last is the shortest: nothing of the next message is taken for the rest of it.
    malformed = [*([engine, *part] for engine in engines for part in parts), *parts]
    with Stranger(cluster, knows_server=True) as stranger:
        for port in sorted(cluster.ipyparallel_ports()):
            for kind in (zmq.DEALER, zmq.PUB):
                made = stranger.connect(kind, port)
                made.poll(50, zmq.POLLOUT)
                for frames in malformed:
                    try:
                        made.send_multipart(frames, zmq.NOBLOCK)
                    except zmq.Again:
                        break
        time.sleep(PATIENCE_MS / 1000)  # nobody tells a stranger what became of it
    still_works(cluster)


def test_the_store_and_gloo_are_open_to_whoever_reaches_them_the_named_exception(
    cluster: Cluster,
) -> None:
    for port in (cluster.store_port, *cluster.gloo_ports):
        with socket.create_connection((cluster.address, port), timeout=30) as raw:
            raw.sendall(os.urandom(4096))  # it is open, and noise at least does not stop it
    still_works(cluster)


@pytest.mark.slow  # test_kernel_ends.py shows that no process is left which could
def test_nothing_listens_once_the_kernel_was_killed(tmp_path: Path) -> None:
    # After an ordinary stop: test_hosts.py.
    with Notebook(tmp_path) as notebook:
        notebook.start()
        family = Family(notebook.pid)
        ports = {(address, port) for _, address, port in listening(family.processes)}
        assert len(ports) > 5
        os.kill(notebook.pid, signal.SIGKILL)
        family.assert_gone()
        assert not [place for place in ports if _answers(place)]


def _answers(place: tuple[str, int]) -> bool:
    try:
        with socket.create_connection(place, timeout=30):
            return True
    except ConnectionRefusedError:
        return False
