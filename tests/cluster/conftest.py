"""One real cluster of two CPU ranks in this process, and one in a real Jupyter kernel.

Both are shared by the package: what a test breaks on purpose is started again for the next.
"""

import os
import queue
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

import nbdist
from nbdist import Session
from tests.groups import tests_below
from tests.lifecycle.kernels import argv_of, pid_of

ROOT = Path(__file__).resolve().parents[2]
LONGEST_S = 30.0  # a bound that tells a hang from a slow machine
# What a cell has before any test. The rest goes where a module of tests begins: a model in shards
# that no test holds any more would be lost with a rank that another kills, and the cell would fail.
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


class SharedCluster:
    """A session that is started when it is needed, and again when a test has broken it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._session: Session | None = None
        self.module = ""  # of the newest test

    def healthy(self) -> Session:
        """Return a session whose two ranks live, agree and do nothing."""
        session = self._session
        if session is not None and session.is_running:
            try:
                answers = session.run(
                    "_t = torch.ones(2); dist.all_reduce(_t); _t.tolist()", timeout_s=LONGEST_S
                )
                if answers.value_list == [[2.0, 2.0]] * 2:
                    return session
            except nbdist.NBDistError:
                pass  # a test has broken it, as some do on purpose
        self.stop()
        with pytest.MonkeyPatch.context() as patch:
            # The logs and the runs lie beside the "notebook".
            patch.chdir(self._folder)
            patch.setenv("PYTHONPATH", str(ROOT))
            self._session = nbdist.start(n=2, device="cpu")
        return self._session

    def stop(self) -> None:
        """End it, if it runs."""
        if self._session is not None:
            self._session.stop()
            self._session = None


@pytest.fixture(scope="package")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedCluster]:
    """The shared cluster, for tests that break it more than once."""
    shared = SharedCluster(tmp_path_factory.mktemp("session"))
    yield shared
    shared.stop()


@pytest.fixture
def session(
    cluster: SharedCluster, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Session:
    """A running session with two healthy ranks."""
    session = cluster.healthy()
    if cluster.module != request.path.stem:
        cluster.module = request.path.stem
        session.run(FORGET)
    monkeypatch.chdir(cluster._folder)
    return session


@dataclass(slots=True)
class Ran:
    """What one cell of the notebook did.

    `outputs` are as the saved file holds them; `messages` are (seconds since the cell was sent,
    message) as they came; `error` is the name and the text of the error, and what IPython showed.
    """

    outputs: list[dict[str, Any]] = field(default_factory=list)
    messages: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    error: tuple[str, str, str] | None = None

    @property
    def text(self) -> str:
        """All text that stays: streams, and the text of displays, in order."""
        parts = []
        for output in self.outputs:
            if output["output_type"] == "stream":
                parts.append(output["text"])
            elif output["output_type"] != "error":
                parts.append(output["data"].get("text/plain", ""))
        return "\n".join(part.rstrip("\n") for part in parts)

    @property
    def mimes(self) -> list[list[str]]:
        """The kinds of each display that stays."""
        return [sorted(o["data"]) for o in self.outputs if "data" in o]

    @property
    def live(self) -> list[str]:
        """Every text that was shown, in order of arrival, passing ones too."""
        shown = []
        for _, message in self.messages:
            content = message["content"]
            if "data" in content and "text/plain" in content["data"]:
                shown.append(content["data"]["text/plain"])
            elif message["msg_type"] == "stream":
                shown.append(content["text"])
        return shown

    @property
    def size(self) -> int:
        """Characters of everything that was sent to the browser."""
        return sum(len(repr(message["content"])) for _, message in self.messages)


class Kernel:
    """A real kernel behind a notebook. Its cluster is started when a test asks for `ready`."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder = folder
        self.module = ""  # of the newest test
        self._environment = environment
        self._start()

    def _start(self) -> None:
        self._manager = KernelManager(kernel_name="python3")
        # The Python that runs the tests, whatever kernels this machine has.
        argv_of(self._manager)[0] = sys.executable
        self._manager.start_kernel(
            cwd=str(self.folder),
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "IPYTHONDIR": str(self.folder / "ipython"),
                "NBDIST_STATIC": "0",
                **self._environment,
            },
        )
        self._client: BlockingKernelClient = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=LONGEST_S)

    @property
    def pid(self) -> int:
        """The kernel's process."""
        return pid_of(self._manager)

    def run(
        self,
        code: str,
        *,
        interrupt_after: Sequence[str] = (),
        timeout_s: float = LONGEST_S,
        then: Callable[[], None] | None = None,
    ) -> Ran:
        """Run a cell to its end.

        Args:
            code: The cell.
            interrupt_after: Texts; the kernel is interrupted as each of them has been shown.
            timeout_s: Longest wait for anything more.
            then: Called instead of the interrupts.
        """
        waiting = list(interrupt_after)
        ran = Ran()
        began = time.monotonic()
        sent = self._client.execute(code, allow_stdin=False, stop_on_error=False)
        seen = ""
        while True:
            try:
                message = self._client.get_iopub_msg(timeout=timeout_s)
            except queue.Empty:
                # A fresh one, so that one hang fails one test.
                self.close()
                self._start()
                raise AssertionError(
                    f"the kernel said nothing more in {timeout_s} s; shown: {seen[-2000:]}"
                ) from None
            if message["parent_header"].get("msg_id") != sent:
                continue
            ran.messages.append((time.monotonic() - began, message))
            content = message["content"]
            if message["msg_type"] == "status" and content["execution_state"] == "idle":
                break
            seen += content.get("data", {}).get("text/plain", "") + str(content.get("text", ""))
            while waiting and waiting[0] in seen:
                waiting.pop(0)
                (then or self.interrupt)()
        reply = self._client.get_shell_msg(timeout=timeout_s)
        while reply["parent_header"].get("msg_id") != sent:
            reply = self._client.get_shell_msg(timeout=timeout_s)
        assert not waiting, f"never shown: {waiting}; shown: {seen[-2000:]}"
        ran.outputs = saved_outputs([message for _, message in ran.messages])
        for output in ran.outputs:
            if output["output_type"] == "error":
                told = "\n".join(output["traceback"])
                ran.error = (output["ename"], output["evalue"], told)
        return ran

    def interrupt(self) -> None:
        """Interrupt it as Jupyter does: SIGINT to the kernel's process group."""
        self._manager.interrupt_kernel()

    def cell(self, code: str, options: str = "", **more: Any) -> Ran:
        """Run a `%%distributed` cell."""
        return self.run(f"%%distributed {options}\n{code}", **more)

    def complete(self, code: str) -> list[str]:
        """Return what Tab offers at the end of `code`."""
        reply = self._client.complete(code, len(code), reply=True, timeout=LONGEST_S)
        matches: list[str] = reply["content"]["matches"]
        return matches

    def complete_in_subshell(self, code: str) -> list[str]:
        """Return what Tab offers where a front end asks in a subshell, also while a cell runs."""
        session, control = self._client.session, self._client.control_channel
        control.send(session.msg("create_subshell_request"))
        subshell = control.get_msg(timeout=LONGEST_S)["content"]["subshell_id"]
        asked = session.msg("complete_request", {"code": code, "cursor_pos": len(code)})
        asked["header"]["subshell_id"] = subshell
        self._client.shell_channel.send(asked)
        reply = self._client.get_shell_msg(timeout=LONGEST_S)
        assert reply["msg_type"] == "complete_reply", reply  # the cell's own would come later
        control.send(session.msg("delete_subshell_request", {"subshell_id": subshell}))
        control.get_msg(timeout=LONGEST_S)
        matches: list[str] = reply["content"]["matches"]
        return matches

    def inspect(self, code: str) -> str:
        """Return what Shift+Tab shows at the end of `code`; "" for nothing."""
        reply = self._client.inspect(code, len(code), reply=True, timeout=LONGEST_S)
        text: str = reply["content"]["data"].get("text/plain", "")
        return text

    def close(self) -> None:
        """End the kernel; its cluster follows."""
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)
        self._manager.cleanup_resources()


def saved_outputs(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the outputs that a notebook's file holds after these iopub messages."""
    outputs: list[dict[str, Any]] = []
    ids: dict[str, list[dict[str, Any]]] = {}
    clear_next = False
    for message in messages:
        kind, content = message["msg_type"], message["content"]
        if kind == "clear_output":
            clear_next = content["wait"]
            if not content["wait"]:
                outputs, ids = [], {}
            continue
        if kind == "update_display_data":
            for output in ids.get(content["transient"]["display_id"], []):
                output.update(data=content["data"], metadata=content["metadata"])
            continue
        if kind not in ("stream", "display_data", "execute_result", "error"):
            continue
        if clear_next:
            outputs, ids, clear_next = [], {}, False
        if kind == "stream" and outputs and outputs[-1].get("name") == content["name"]:
            outputs[-1]["text"] += content["text"]
            continue
        output = {"output_type": kind, **content}
        output.pop("execution_count", None)
        display_id = output.pop("transient", {}).get("display_id")
        if display_id:
            ids.setdefault(display_id, []).append(output)
        outputs.append(output)
    return outputs


@pytest.fixture(scope="package")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A kernel in which nothing has been loaded by us."""
    kernel = Kernel(tmp_path_factory.mktemp("notebook"))
    yield kernel
    kernel.close()


@pytest.fixture
def notebook(kernel: Kernel, request: pytest.FixtureRequest) -> Kernel:
    """The kernel with `%load_ext nbdist` and two healthy ranks."""
    kernel.run("%load_ext nbdist")
    check = kernel.cell("_t = torch.ones(2); dist.all_reduce(_t); _t.tolist()")
    if "Out: [2.0, 2.0]" not in check.text:
        kernel.run("%dist stop")
        started = kernel.run("%dist start -n 2 --device cpu", timeout_s=2 * LONGEST_S)
        assert "Started 2 ranks" in started.text, started
    if kernel.module != request.path.stem:
        kernel.module = request.path.stem
        assert kernel.cell(FORGET, "--no-track").error is None
    return kernel
