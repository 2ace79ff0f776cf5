"""Install what the test hosts need from Debian's packages: `python -m tests.hosts.install`.

Does nothing where all is there, or where the user is not root; the tests then say what is missing.
No service is started: the tests start their own, in their hosts.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.hosts import requirements

_POLICY = Path("/usr/sbin/policy-rc.d")


def main() -> None:
    """Install the packages whose commands are missing."""
    packages = requirements.missing_packages()
    if not packages or os.geteuid() != 0 or not shutil.which("apt-get"):
        return
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "-qy", "--no-install-recommends", *packages]
    with _no_service_starts():
        for command, timeout_s in ((["apt-get", "update", "-q"], 180), (install, 600)):
            # A failure is told by apt-get itself, and then by the tests that miss the package.
            subprocess.run(command, env=environment, timeout=timeout_s, check=False)


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
