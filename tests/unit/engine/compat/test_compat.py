"""The rooms for private parts of others fit the versions that are installed."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import ipyparallel
import pytest
import torch
from packaging.version import Version

from nbdist.client.cluster import connection
from nbdist.doctor import software


def test_ipyparallels_client_has_every_private_part_that_we_use() -> None:
    assert connection.check() == []


def test_a_private_part_that_is_gone_is_named_with_the_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Newer:
        def execute(self, client: Any) -> Any:
            return client._mux_stream, client._control_stream, client.session

    monkeypatch.setattr(ipyparallel, "Client", Newer)
    found = connection.check()
    version = ipyparallel.__version__
    assert f"ipyparallel {version}: Client._dispatch_reply is gone" in found
    assert f"ipyparallel {version}: Client._query_stream is gone" in found
    assert f"ipyparallel {version}: Client._mux_stream is gone" not in found


def test_the_engines_modules_have_every_private_part_that_we_use() -> None:
    # In a process of its own: the modules belong on a rank.
    assert software.look_at_torch(timeout_s=60).broken == ()


@pytest.mark.skipif(
    Version(torch.__version__) < Version("2.15") or not torch.distributed.is_nccl_available(),
    reason="torch has one class of NCCL, or none",
)
def test_of_torchs_two_classes_of_nccl_ranks_get_the_one_that_recovery_knows() -> None:
    made = """
import torch.distributed as dist, torch.distributed.distributed_c10d as c10d
from nbdist.engine.group import gloo_setup
gloo_setup.environment("127.0.0.1", 29500, "127.0.0.1")
dist.Backend("nccl")
try:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
except Exception as error:
    print(type(error).__name__)
print(c10d.Backend._plugins["NCCL"].creator_fn.__name__)
"""
    told = subprocess.run([sys.executable, "-c", made], capture_output=True, text=True, timeout=60)
    assert told.stdout.split()[-1] == "_create_nccl_process_group", told.stderr


def test_the_doctor_asks_every_module_of_the_engine_that_has_a_check() -> None:
    folder = Path(software.__file__).parents[1] / "engine"
    modules = {
        ".".join(path.relative_to(folder).with_suffix("").parts)
        for path in folder.rglob("*.py")
        if "\ndef check() -> list[str]" in path.read_text()
    }
    assert modules == set(software.MODULES)
