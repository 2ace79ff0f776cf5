"""A real Jupyter kernel for benchmarks: run cells in it, read what they print."""

import json
import os
import queue
import tempfile
import time
from types import TracebackType
from typing import Any

from jupyter_client.manager import KernelManager


class Kernel:
    """A notebook kernel in a temporary folder; a context manager that ends it."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.manager = KernelManager(kernel_name="python3")
        root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
        self.manager.start_kernel(cwd=self._folder.name, env={**os.environ, "PYTHONPATH": path})
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def run(
        self, code: str, timeout_s: float = 300.0, interrupt_after_s: float | None = None
    ) -> tuple[str, str | None, float]:
        """Run a cell; return what it printed, its error's name, and its seconds.

        With `interrupt_after_s`, the seconds count from the interrupt on.
        """
        began = time.monotonic()
        message = self.client.execute(code)
        printed, error = "", None
        while True:
            now = time.monotonic()
            if now - began > timeout_s:
                raise TimeoutError(f"the cell took longer than {timeout_s} s: {code[:80]}")
            if interrupt_after_s is not None and now - began > interrupt_after_s:
                self.manager.interrupt_kernel()
                began, interrupt_after_s = time.monotonic(), None
            try:
                got = self.client.get_iopub_msg(timeout=0.02)
            except queue.Empty:
                continue
            if got["parent_header"].get("msg_id") != message:
                continue
            kind, content = got["msg_type"], got["content"]
            if kind == "stream":
                printed += content["text"]
            elif kind == "error":
                error = content["ename"]
            elif kind == "status" and content["execution_state"] == "idle":
                return printed, error, time.monotonic() - began

    def ask(self, code: str) -> Any:
        """Run a cell whose last line prints JSON; return it."""
        printed, error, _ = self.run(code)
        if error:
            raise RuntimeError(f"{error} in {code[:200]}\n{printed}")
        return json.loads(printed.strip().splitlines()[-1])

    def __enter__(self) -> "Kernel":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self._folder.cleanup()
