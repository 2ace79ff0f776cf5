"""JupyterHub with batchspawner on a test host, as docs/jupyterhub.md has it, and its one user.

The hub and its users' servers are those of `.venv-hub`; notebooks run in this environment.
"""

import json
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from tests.groups import ROOT
from tests.hosts import hub_client
from tests.hosts.commands import close_pipes, end
from tests.hosts.install import HUB
from tests.hosts.slurm import Slurm
from tests.hosts.waiting import wait_until

_URL = "http://127.0.0.1:8000"
# Beside the recipe's own lines: a user without a password, and root's, whom Slurm's hosts have.
_SETTINGS = """\
c.JupyterHub.authenticator_class = "dummy"
c.Authenticator.allowed_users = {{"{user}"}}
c.SlurmSpawner.exec_prefix = ""
c.Spawner.args = ["--allow-root"]
c.JupyterHub.services = [{{"name": "test", "api_token": "{token}"}}]
c.JupyterHub.load_roles = [
    {{"name": "test", "services": ["test"], "scopes": ["servers", "access:servers"]}}
]
"""


class Hub(AbstractContextManager["Hub"]):
    """A hub on the controller's host; `with Hub(slurm, settings) as hub: hub.start_server()`.

    Args:
        slurm: Where servers run.
        settings: Lines of `jupyterhub_config.py`.
        folder: On all hosts; logs and kernels lie there.
    """

    def __init__(self, slurm: Slurm, settings: str, folder: Path) -> None:
        self.host = slurm.controller
        self._log = folder / "hub.log"
        kernel = folder / "kernels" / "nbdist"
        kernel.mkdir(parents=True)
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        spec = {"argv": argv, "display_name": "nbdist", "language": "python"}
        (kernel / "kernel.json").write_text(json.dumps(spec))
        self.host.write(
            "jupyterhub_config.py",
            settings + _SETTINGS.format(token=hub_client.TOKEN, user=hub_client.USER),
        )
        self._log.touch()
        command = f"exec {HUB}/bin/jupyterhub > {self._log} 2>&1"
        path = f"{HUB}/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin"
        self._process = self.host.popen(["bash", "-c", command], env={"PATH": path})
        wait_until(self._is_up, "the hub answers")
        self.host.count_as_services()

    def start_server(self) -> None:
        """Have the hub submit the user's job, and wait for the server in it."""
        self._client("start")

    def run(self, cells: Sequence[str]) -> list[str]:
        """Run cells in a new kernel of the server, and return what each prints."""
        texts: list[str] = json.loads(self._client("run", json.dumps(cells)))
        return texts

    def stop_server(self) -> None:
        """Have the hub end the server."""
        self._client("stop")

    def log(self) -> str:
        """Return what the hub has written, for the message of a failure."""
        return self._log.read_text()

    def _is_up(self) -> bool:
        assert self._process.poll() is None, self.log()
        return "JupyterHub is now running" in self.log()

    def _client(self, what: str, stdin: str = "") -> str:
        script = str(ROOT / "tests" / "hosts" / "hub_client.py")
        words = [f"{HUB}/bin/python", script, _URL, what]
        return self.host.run(words, stdin=stdin, timeout_s=240).stdout

    def __exit__(self, *_raised: object) -> None:
        end(self._process)
        close_pipes(self._process)
