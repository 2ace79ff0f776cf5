"""A notebook's kernel inside a test host, driven from the test.

They talk over Unix sockets in the bed's shared folder: these do not mind network namespaces, so
that the kernel sees the network of its host and nothing else.
"""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.connect import write_connection_file

from tests.hosts.commands import close_pipes, end
from tests.hosts.host import Host
from tests.hosts.namespaces import child_pid

_READY_TIMEOUT_S = 60.0


class Kernel(AbstractContextManager["Kernel"]):
    """An IPython kernel in `host`: `with Kernel(host) as kernel: kernel.run("print(1)")`."""

    def __init__(self, host: Host) -> None:
        shared = host.site.folder / "shared"
        sockets = shared / f"kernel-{host.name}-{len(list(shared.iterdir()))}"
        file, _ = write_connection_file(f"{sockets}.json", ip=str(sockets), transport="ipc")
        self._log = shared / f"{sockets.name}.log"
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", file]
        # Its text goes to a file: a pipe that nobody reads would stop it one day.
        self._process = host.popen(
            ["bash", "-c", 'exec "$@" >> "$0" 2>&1', str(self._log), *command]
        )
        self._client = BlockingKernelClient(connection_file=file)
        self._client.load_connection_file()
        # No heartbeat: it takes a kernel that is busy for a second for a dead one.
        self._client.start_channels(hb=False)
        try:
            self._client.wait_for_ready(timeout=_READY_TIMEOUT_S)
        except RuntimeError as error:
            self.close()
            raise AssertionError(f"the kernel in {host.name}: {self._log.read_text()}") from error

    @property
    def pid(self) -> int:
        """The kernel's process, as seen here: for kill -9 and SIGINT."""
        return child_pid(self._process)

    def run(
        self, code: str, timeout_s: float = 120, watch: Callable[[str], None] | None = None
    ) -> str:
        """Run a cell, and return what it prints and shows as text, as it looks at the end.

        Args:
            code: The cell.
            timeout_s: For it to end.
            watch: Called with the text so far, whenever there is more.

        Raises:
            TimeoutError: it did not end in time.
        """
        output = _Output()

        def hear(message: dict[str, Any]) -> None:
            output.hear(message)
            if watch is not None:
                watch("".join(output.texts.values()))

        self._client.execute_interactive(
            code, timeout=timeout_s, output_hook=hear, allow_stdin=False
        )
        return "".join(output.texts.values())

    def close(self) -> None:
        """Kill the kernel, as its host's reset would."""
        self._client.stop_channels()
        end(self._process)
        close_pipes(self._process)

    def __exit__(self, *_raised: object) -> None:
        self.close()


class _Output:
    """The text of a cell: what is shown is replaced when it is updated, as in a notebook."""

    def __init__(self) -> None:
        self.texts: dict[object, str] = {}

    def hear(self, message: dict[str, Any]) -> None:
        """Take a message of the cell."""
        content = message["content"]
        place = content.get("transient", {}).get("display_id", len(self.texts))
        match message["msg_type"]:
            case "stream":
                self.texts[place] = content["text"]
            case "error":
                self.texts[place] = "\n".join(content["traceback"]) + "\n"
            case "display_data" | "update_display_data" | "execute_result":
                self.texts[place] = content["data"].get("text/plain", "") + "\n"
