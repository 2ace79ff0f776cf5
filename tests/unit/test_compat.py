"""The rooms for private parts of others fit the versions that are installed.

torch's room says so in tests/group, where torch is: `test_group.py` and `test_tap.py`.
"""

import subprocess
import sys
from typing import Any

import ipyparallel
import pytest

from nbdist.client import ipp


def test_ipyparallels_client_has_every_private_part_that_we_use() -> None:
    assert ipp.check() == []


def test_a_private_part_that_is_gone_is_named_with_the_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Newer:
        def execute(self, client: Any) -> Any:
            return client._mux_stream, client._control_stream, client.session

    monkeypatch.setattr(ipyparallel, "Client", Newer)
    found = ipp.check()
    version = ipyparallel.__version__
    assert f"ipyparallel {version}: Client._dispatch_reply is gone" in found
    assert f"ipyparallel {version}: Client._query_stream is gone" in found
    assert f"ipyparallel {version}: Client._mux_stream is gone" not in found


def test_the_engines_kernel_has_every_private_part_that_we_use() -> None:
    # A process of its own: the module belongs on a rank.
    code = "from nbdist.engine import kernel; print(kernel.check())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"
