"""What a cluster is started with is checked when it is made, and filled in for the machine."""

import os
from dataclasses import asdict
from typing import Any

import pytest

from nbdist.errors import StartError, UsageError
from nbdist.options import MOST_RANKS_A_CORE, ClusterOptions, choose_options

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


def test_options_reach_a_rank_as_they_were_made() -> None:
    options = chosen(n=3, tap="counts", quiet=0.0, check="off")
    assert ClusterOptions(**asdict(options)) == options


def test_a_cluster_is_described_in_a_line() -> None:
    assert str(chosen(n=1)) == "1 rank on cpu, gloo"
    assert str(chosen(address="192.0.2.7")).endswith("open to the network on 192.0.2.7")


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"n": 0}, "-n is the number of ranks, at least 1, not 0."),
        ({"threads": 0}, "threads is at least 1, not 0."),
        ({"device": "tpu"}, 'device is "cpu" or "cuda", not \'tpu\'.'),
        ({"backend": "mpi"}, 'backend is "gloo" or "nccl", not \'mpi\'.'),
        ({"tap": "all"}, 'tap is "off", "counts" or "full", not \'all\'.'),
        ({"check": "on"}, 'check is "shared", "store" or "off", not \'on\'.'),
        ({"timeout": 0.0}, "timeout is a number of seconds above 0, not 0."),
        ({"timeout": float("nan")}, "timeout is a number of seconds above 0, not nan."),
        ({"quiet": -1.0}, "quiet is a number of seconds, 0 for never, not -1."),
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


def test_more_ranks_than_gpus_are_refused_with_both_ways_out() -> None:
    with pytest.raises(StartError, match="3 ranks need 3 GPUs, and this machine has 1") as refused:
        chosen(1, n=3, device="cuda")
    assert "%dist start -n 1" in refused.value.do
    assert "%dist start -n 3 --device cpu" in refused.value.do
    assert chosen(1, n=3, device="cuda", backend="gloo").n == 3


def test_a_negative_number_of_steps_between_peer_snapshots_is_refused() -> None:
    assert chosen(peer_snapshots=10).peer_snapshots == 10
    with pytest.raises(UsageError, match="--peer-snapshots is a number of steps, 0 for never"):
        chosen(peer_snapshots=-1)
