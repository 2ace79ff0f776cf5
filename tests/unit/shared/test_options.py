"""What a cluster is started with is checked when it is made, and filled in for the machine."""

import os
from dataclasses import asdict
from typing import Any

import pytest

from nbdist.shared.errors import StartError, UsageError
from nbdist.shared.options import (
    MOST_RANKS_A_CORE,
    ClusterOptions,
    choose_options,
    cores_note,
    sharing_note,
)

NOTHING: dict[str, Any] = {"n": None, "device": None, "backend": None, "threads": None}


def chosen(gpus: int = 0, **asked: Any) -> ClusterOptions:
    return choose_options(gpus, **NOTHING | asked)


def test_without_gpus_two_ranks_run_on_the_cpu() -> None:
    assert (chosen().n, chosen().device, chosen().backend) == (2, "cpu", "gloo")


def test_with_gpus_each_of_them_gets_a_rank() -> None:
    options = chosen(4)
    assert (options.n, options.device, options.backend) == (4, "cuda", "cpu:gloo,cuda:nccl")


def test_ranks_share_the_cores_and_each_has_one_thread_at_least() -> None:
    assert chosen(n=1).threads >= chosen(n=2).threads >= 1
    assert chosen(n=64).threads == 1
    assert chosen(n=2, threads=7).threads == 7


@pytest.mark.parametrize(
    ("n", "cores", "said"),
    [
        (2, 2, ""),
        (2, 64, ""),
        (40, 2, "40 ranks on 2 cores: each gets 1/20 of a core."),
        (3, 2, "3 ranks on 2 cores: each gets 2/3 of a core."),
        (2, 1, "2 ranks on 1 core: each gets 1/2 of a core."),
        (3, 1.5, "3 ranks on 1.5 cores: each gets 1/2 of a core."),
    ],
)
def test_more_ranks_than_cores_are_told_what_each_gets(n: int, cores: float, said: str) -> None:
    assert cores_note(chosen(n=n, slots=n), cores) == said
    assert cores_note(chosen(n, n=n), cores) == ""  # on GPUs


def test_options_reach_a_rank_as_they_were_made() -> None:
    options = chosen(n=3, tap="counts", quiet=0.0, check="off")
    assert ClusterOptions(**asdict(options)) == options


def test_a_cluster_is_described_in_a_line() -> None:
    assert str(chosen(n=1)) == "1 rank on cpu, gloo"
    assert str(chosen(address="192.0.2.7")).endswith("open to the network on 192.0.2.7")


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"n": 0}, "n is the number of ranks, at least 1, not 0."),
        ({"threads": 0}, "threads is at least 1, not 0."),
        ({"n": "2"}, "n is the number of ranks, at least 1, not '2'."),
        ({"threads": "x"}, "threads is at least 1, not 'x'."),
        ({"device": "tpu"}, 'device is "cpu" or "cuda", not \'tpu\'.'),
        ({"backend": "mpi"}, 'backend is "gloo" or "nccl", not \'mpi\'.'),
        ({"tap": "all"}, 'tap is "off", "counts" or "full", not \'all\'.'),
        ({"check": "on"}, 'check is "shared", "store" or "off", not \'on\'.'),
        ({"timeout": 0.0}, "timeout is a number of seconds above 0, not 0.0."),
        ({"timeout": float("nan")}, "timeout is a number of seconds above 0, not nan."),
        ({"quiet": -1.0}, "quiet is a number of seconds, 0 for never, not -1.0."),
        ({"backend": "nccl"}, "backend nccl needs device cuda; on the CPU it is gloo."),
    ],
)
def test_what_makes_no_sense_is_one_sentence(asked: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError) as refused:
        chosen(**asked)
    assert str(refused.value) == sentence


def test_more_ranks_than_a_machine_carries_are_refused_with_the_most_it_does() -> None:
    most = MOST_RANKS_A_CORE * (os.cpu_count() or 1)
    assert chosen(n=most).n == most
    with pytest.raises(UsageError, match=f"use at most {most}"):
        chosen(n=most + 1)


@pytest.mark.parametrize(
    ("asked", "backend"),
    [
        ({"n": 4}, "cpu:gloo,cuda:nccl"),
        ({"n": 5}, "gloo"),
        ({"n": 5, "backend": "gloo"}, "gloo"),
        ({"n": 2, "backend": "nccl"}, "nccl"),
        ({"n": 5, "device": "cpu"}, "gloo"),
    ],
)
def test_ranks_use_nccl_where_each_has_a_gpu_and_gloo_where_they_share(
    asked: dict[str, Any], backend: str
) -> None:
    options = chosen(4, **asked)
    assert options.backend == backend
    assert options.device == asked.get("device", "cuda")


def test_who_shares_a_gpu_learns_over_what_and_what_it_means_for_times() -> None:
    turns = "Ranks on one GPU take turns: times here are no forecast for one GPU a rank."
    over_gloo = "over gloo, because NCCL refuses two ranks on one GPU."
    assert sharing_note(chosen(1, n=4), 1) == f"4 ranks share 1 GPU, {over_gloo} {turns}"
    assert sharing_note(chosen(3, n=4, backend="gloo"), 3).startswith("4 ranks share 3 GPUs, over")
    over_nccl = ClusterOptions(n=2, device="cuda", backend="nccl", threads=1)
    assert sharing_note(over_nccl, 1) == (
        f"2 ranks share 1 GPU, over nccl, as NCCL_MULTI_RANK_GPU_ENABLE=1 allows. {turns}"
    )


def test_nothing_is_said_of_sharing_where_no_rank_shares() -> None:
    for alone in (chosen(4), chosen(4, n=2, backend="gloo"), chosen(4, n=8, device="cpu")):
        assert not sharing_note(alone, 4)


def test_nccl_on_a_shared_gpu_is_refused_unless_it_is_told_to_allow_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    with pytest.raises(StartError) as refused:
        chosen(1, n=3, backend="nccl")
    assert refused.value.what == "3 ranks need 3 GPUs with nccl, and there is 1."
    assert "NCCL refuses two ranks on one GPU, unless NCCL_MULTI_RANK" in refused.value.why
    for way_out in ("-n 1", "-n 3 --backend gloo", "-n 3 --device cpu"):
        assert f"%dist start {way_out}" in refused.value.do
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert chosen(1, n=3, backend="nccl").backend == "nccl"


@pytest.mark.parametrize("backend", [None, "gloo", "nccl"])
def test_cuda_without_a_gpu_is_refused_with_every_backend(backend: str | None) -> None:
    with pytest.raises(
        StartError, match="3 ranks on cuda need GPUs, and there are none"
    ) as refused:
        chosen(n=3, device="cuda", backend=backend)
    assert refused.value.do == "%dist start -n 3 --device cpu"


def test_ranks_share_gpus_of_several_hosts_only_where_each_host_has_one() -> None:
    assert chosen(3, slots=4, gpus_each=1).backend == "gloo"
    assert chosen(4, slots=4, gpus_each=2).backend == "cpu:gloo,cuda:nccl"
    with pytest.raises(
        StartError, match="4 ranks on cuda need GPUs, and one of the hosts has none"
    ):
        chosen(2, slots=4, gpus_each=0)


def test_without_a_gpu_that_can_be_used_its_reason_is_given() -> None:
    with pytest.raises(StartError) as refused:
        chosen(n=2, device="cuda", no_gpu="Found no NVIDIA driver on your system.")
    assert refused.value.why == (
        "There is no NVIDIA driver on this machine, or none in this container. "
        "(Found no NVIDIA driver on your system.)"
    )
    assert "install the driver" in refused.value.do
    assert "%dist start --device cpu" in refused.value.do


def test_a_negative_number_of_steps_between_peer_snapshots_is_refused() -> None:
    assert chosen(peer_snapshots=10).peer_snapshots == 10
    with pytest.raises(UsageError, match="peer_snapshots is a number of steps, 0 for never"):
        chosen(peer_snapshots=-1)
