"""The environment of a rank is torchrun's."""

import logging

import pytest

from nbdist.engine.kernel.environment import (
    group_variables,
    hush_torchao,
    rank_variables,
    restore,
)
from nbdist.shared.options import ClusterOptions
from nbdist.shared.placement import RankPlacement

PLACE = RankPlacement(local_rank=1, local_size=4)


def _options(device: str) -> ClusterOptions:
    return ClusterOptions(n=4, device=device, backend="gloo", threads=3)


def test_a_rank_has_what_torchrun_sets() -> None:
    variables = rank_variables(1, _options("cuda"), PLACE) | group_variables("127.0.0.1", 29500)
    torchrun = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK"
    torchrun += " ROLE_WORLD_SIZE ROLE_NAME MASTER_ADDR MASTER_PORT OMP_NUM_THREADS"
    torchrun += " TORCHELASTIC_RUN_ID TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS"
    torchrun += " TORCHELASTIC_USE_AGENT_STORE"
    assert set(torchrun.split()) <= set(variables)
    assert variables["RANK"] == variables["LOCAL_RANK"] == "1"
    assert variables["WORLD_SIZE"] == "4"
    assert variables["OMP_NUM_THREADS"] == "3"
    assert all(isinstance(value, str) for value in variables.values())


def test_only_a_rank_on_the_cpu_tells_accelerate_so() -> None:
    assert "ACCELERATE_USE_CPU" in rank_variables(0, _options("cpu"), PLACE)
    assert "ACCELERATE_USE_CPU" not in rank_variables(0, _options("cuda"), PLACE)


def test_what_a_library_deleted_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "spoiled")
    monkeypatch.delenv("WORLD_SIZE")
    restore({"RANK": "1", "WORLD_SIZE": "2"})
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("1", "2")


def test_of_what_torchao_logs_only_its_missing_extensions_are_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = logging.getLogger("torchao")
    before = list(log.filters)
    try:
        hush_torchao()
        log.warning("Failed to load /lib/_C_cutlass_90a.abi3.so: Could not load this library")
        log.warning("Failed to load the weights: no such file")
    finally:
        log.filters[:] = before
    assert [record.getMessage() for record in caplog.records] == [
        "Failed to load the weights: no such file"
    ]
