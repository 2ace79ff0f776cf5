"""Where a rank without a notebook is: as torchrun tells it, or Ray, Spark and Azure."""

import subprocess
import sys

import pytest
import torch.distributed as dist

from nbdist.engine.rank import standalone
from nbdist.engine.rank.standalone import _gpus, _place, init
from nbdist.shared.errors import StartError, UsageError
from nbdist.shared.options import LOOPBACK
from nbdist.shared.placement import HERE

TOLD = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"}


def test_ranks_of_one_node_meet_on_loopback() -> None:
    for told in ({}, {"LOCAL_WORLD_SIZE": "4", "NODE_RANK": "0"}, {"GROUP_WORLD_SIZE": "1"}):
        rank, place = _place(TOLD | told)
        assert (rank, place.host, place.address, place.nodes) == (3, HERE, LOOPBACK, 1)
        assert (place.local_rank, place.local_size) == (1, 4)


def test_nodes_that_only_torchrun_counts_follow_from_the_ranks_of_each() -> None:
    by_torchrun = {"LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2"}
    by_ray = {"LOCAL_WORLD_SIZE": "2", "NODE_RANK": "1"}
    assert _place(TOLD | by_torchrun) == _place(TOLD | by_ray)
    _, place = _place(TOLD | by_ray)
    assert (place.host, place.node, place.nodes, place.local_size) == ("node 1", 1, 2, 2)


def test_a_node_with_most_of_the_ranks_is_not_taken_for_all_nodes() -> None:
    _, place = _place(TOLD | {"RANK": "2", "LOCAL_WORLD_SIZE": "3", "NODE_RANK": "0"})
    assert place.nodes == 2


def test_a_group_that_others_have_made_is_refused_with_what_to_do() -> None:
    assert not dist.is_initialized()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(UsageError) as refused:
            init()
    finally:
        dist.destroy_process_group()
    assert "There is a process group already" in refused.value.what
    assert "put it below nbdist.init()" in refused.value.do


def test_a_script_whose_layout_needs_other_ranks_is_started_with_them_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.argv", ["/home/ada/train.py"])
    monkeypatch.setattr(standalone.here, "ranks_on_host", 2)
    assert standalone._on_other_ranks(4, 2, "fill one in") == (
        "torchrun --nproc-per-node 4 train.py    (or fill one in)"
    )
    assert standalone._on_other_ranks(8, 4, "") == "start 8 ranks"
    assert standalone._on_other_ranks(None, 2, "keep one of the two") == "keep one of the two"


def test_a_device_that_nobody_has_is_refused_without_the_words_of_a_magic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (TOLD | {"LOCAL_WORLD_SIZE": "4"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError) as refused:
        init(device="gpu")
    assert str(refused.value) == 'device is "cpu" or "cuda", not \'gpu\'.'


def test_each_machine_needs_gpus_for_its_own_ranks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    assert _gpus(8, 8, "cuda", None) == _gpus(8, 8, None, None) == 16
    assert _gpus(0, 8, None, None) == 0
    assert _gpus(2, 8, "cuda", "gloo") == 16
    with pytest.raises(StartError) as refused:
        _gpus(4, 8, None, None)
    assert str(refused.value).startswith("8 ranks of this machine need as many GPUs, and it has 4.")
    assert refused.value.do == (
        'torchrun --nproc-per-node 4, or nbdist.init(backend="gloo") to share them, '
        'or nbdist.init(device="cpu")'
    )
    with pytest.raises(StartError, match="need as many GPUs, and it has 0"):
        _gpus(0, 8, "cuda", "gloo")
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert _gpus(4, 8, None, None) == 16


def test_an_exported_script_runs_where_no_notebook_is_installed() -> None:
    # An image for jobs has torch and IPython, but no kernel, cluster, widgets or tracker.
    code = """
import sys
for name in ("ipykernel", "ipyparallel", "ipywidgets", "matplotlib", "mlflow"):
    sys.modules[name] = None
from nbdist.engine.rank import register, standalone
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
