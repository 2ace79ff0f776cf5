"""A notebook's kernel as Jupyter runs one, and every process that comes of it.

The kernel gets a temp folder of its own (`TMPDIR`), so that a test sees what is left in it.
"""

import os
import re
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager
from jupyter_client.provisioning.local_provisioner import LocalProvisioner

_COLOUR = re.compile(r"\x1b\[[\d;]*m")

ROOT = Path(__file__).resolve().parents[2]

# What each rank of five does while its notebook ends: nothing, Python, a collective, C without
# the GIL, C with it. (Rank 0 sends nothing, so rank 2 waits.)
_BUSY = """
import ctypes, pathlib
pathlib.Path(f"busy-{rank}").touch()
if rank == 1:
    while True:
        pass
if rank == 2:
    dist.recv(torch.zeros(1), src=0)
if rank == 3:
    ctypes.CDLL(None).sleep(600)
if rank == 4:
    ctypes.PyDLL(None).sleep(600)
"""


def private_environment(folder: Path) -> dict[str, str]:
    """Return an environment whose temp files and settings lie in `folder`."""
    temp = folder / "temp"
    temp.mkdir(exist_ok=True)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {
        **os.environ,
        "TMPDIR": str(temp),
        "IPYTHONDIR": str(folder / "ipython"),
        "PYTHONPATH": path,
    }


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = 30.0) -> None:
    """Wait until `condition()` is true.

    Raises:
        AssertionError: It did not become so within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
        time.sleep(0.05)  # processes and files of others: there is no event to wait for


def argv_of(manager: KernelManager) -> list[str]:
    """The command that starts the kernel, to be changed before it does."""
    assert manager.kernel_spec is not None
    argv: list[str] = manager.kernel_spec.argv
    return argv


def pid_of(manager: KernelManager) -> int:
    """The kernel's process."""
    assert isinstance(manager.provisioner, LocalProvisioner)
    assert manager.provisioner.pid is not None
    return manager.provisioner.pid


class Notebook:
    """One kernel and its client. Use as a context manager: the kernel ends with it."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder = folder
        self.environment = {**private_environment(folder), **environment}
        self.manager = KernelManager(kernel_name="python3")
        # The Python that runs the tests, whatever kernels this machine has.
        self.argv[0] = sys.executable
        self._client: BlockingKernelClient | None = None

    def __enter__(self) -> "Notebook":
        self.manager.start_kernel(cwd=str(self.folder), env=self.environment)
        self._client = self.manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=60)
        return self

    def __exit__(self, *_: object) -> None:
        if self._client is not None:
            self._client.stop_channels()
        if self.manager.has_kernel:
            self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()

    @property
    def argv(self) -> list[str]:
        """The command that starts the kernel, to be changed before it does."""
        return argv_of(self.manager)

    @property
    def client(self) -> BlockingKernelClient:
        """The connection to the running kernel."""
        assert self._client is not None
        return self._client

    @property
    def pid(self) -> int:
        """The kernel's process."""
        return pid_of(self.manager)

    @property
    def keys(self) -> list[Path]:
        """The private folders with connection keys that lie in the temp folder now."""
        return sorted((self.folder / "temp").glob("nbdist-*"))

    def run(self, code: str, timeout_s: float = 90.0) -> str:
        """Run a cell to its end; return what it showed, its error included."""
        said: dict[object, str] = {}  # a display that is updated keeps its place

        def hear(message: dict[str, Any]) -> None:
            content = message["content"]
            place = content.get("transient", {}).get("display_id", len(said))
            if message["msg_type"] == "stream":
                said[place] = content["text"]
            elif message["msg_type"] == "error":
                said[place] = _COLOUR.sub("", "\n".join(content["traceback"]))
            elif "data" in content:
                said[place] = content["data"].get("text/plain", "")

        self.client.execute_interactive(
            code, timeout=timeout_s, output_hook=hear, allow_stdin=False, stop_on_error=False
        )
        return "\n".join(said.values())

    def send(self, code: str) -> None:
        """Send a cell and do not wait for it."""
        self.client.execute(code, stop_on_error=False)

    def start(self, options: str = "-n 2 --device cpu") -> None:
        """Load nbdist and start a cluster."""
        said = self.run(f"import nbdist\n%load_ext nbdist\n%dist start {options}")
        assert "Started" in said, said

    def on_ranks(self, code: str, options: str = "") -> str:
        """Run a `%%distributed` cell to its end; return what it showed."""
        return self.run(f"%%distributed {options}\n{code}")

    def keep_busy(self, ranks: int = 5) -> None:
        """Bring up to five ranks into five states; returns when all are in theirs."""
        self.send(f"%%distributed\n{_BUSY}")
        wait_for(lambda: len(list(self.folder.glob("busy-*"))) == ranks, "busy ranks")

    def pids(self) -> dict[str, int]:
        """Return the processes of the cluster by the launcher's keys, `parent` among them."""
        said = self.run(
            "import nbdist.client.notebook.current as _s\n"
            "print({**_s._launcher._link.pids, 'parent': _s._launcher._parent.pid})"
        )
        pids: dict[str, int] = eval(said)
        return pids


class Family:
    """Every process that descends from one, as it was when asked, and what joins their sessions."""

    def __init__(self, pid: int) -> None:
        root = psutil.Process(pid)
        self.processes = root.children(recursive=True)
        own = os.getsid(pid)
        self._sessions = {
            sid for p in self.processes if (sid := _session(p.pid)) not in (None, own)
        }

    def living(self) -> list[str]:
        """Return a line for each process that is still there."""
        known = {p.pid: p for p in self.processes if p.is_running()}
        joined = {p.pid: p for p in psutil.process_iter() if _session(p.pid) in self._sessions}
        return [line for p in {**known, **joined}.values() if (line := _describe(p))]

    def assert_gone(self, timeout_s: float = 20.0) -> None:
        """Wait until none is left; what is left after `timeout_s` is ended, and an error."""
        try:
            wait_for(lambda: not self.living(), "every process to end", timeout_s)
        except AssertionError:
            left = self.living()
            self.end()
            raise AssertionError("\n".join([f"left after {timeout_s:g} s:", *left])) from None

    def end(self) -> None:
        """Kill what is left."""
        for process in psutil.process_iter():
            if process in self.processes or _session(process.pid) in self._sessions:
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    continue


def listening(processes: Iterable[psutil.Process]) -> list[tuple[int, str, int]]:
    """Return (pid, address, port) of every socket that waits for a caller."""
    found = []
    for process in processes:
        try:
            connections = process.net_connections(kind="inet")
        except psutil.NoSuchProcess:
            continue
        found += [
            (process.pid, c.laddr.ip, c.laddr.port)
            for c in connections
            if c.status == psutil.CONN_LISTEN or (c.type.name == "SOCK_DGRAM")
        ]
    return found


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def _describe(process: psutil.Process) -> str:
    """Return a line about a process; empty when it has ended, also if nobody collected it yet."""
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return ""
        return f"{process.pid} {' '.join(process.cmdline())[:150]}"
    except psutil.NoSuchProcess:
        return ""
