"""What a virtual device and its link are written as."""

from typing import Any

import pytest

from nbdist.shared.errors import UsageError
from nbdist.shared.options import ClusterOptions, choose_options
from nbdist.shared.virtual import VirtualMachine
from nbdist.study.virtual import with_rates

NOTHING: dict[str, Any] = {"n": 4, "device": None, "backend": None, "threads": None}


@pytest.mark.parametrize(
    ("text", "flops_per_s", "bytes_per_s", "slowed", "latency_s"),
    [
        ("2 GFLOP/s, 100 Mbit/s", 2e9, 12.5e6, 1, 0),
        ("2gflops,12.5MB/s 5ms", 2e9, 12.5e6, 1, 5e-3),
        ("1.5 TFLOP/s, 1 Gbit/s 40 us, 50x slower", 1.5e12, 125e6, 50, 40e-6),
        ("800 TFLOP/s, 450 GB/s, 1e6x slower", 8e14, 450e9, 1e6, 0),
    ],
)
def test_a_machine_is_read_as_people_write_rates(
    text: str, flops_per_s: float, bytes_per_s: float, slowed: float, latency_s: float
) -> None:
    read = VirtualMachine.read(text)
    assert read == VirtualMachine(flops_per_s, bytes_per_s, slowed, latency_s)
    assert (read.flops_here, read.bytes_here) == (flops_per_s / slowed, bytes_per_s / slowed)
    assert read.latency_here == latency_s * slowed
    assert VirtualMachine.read(str(read)) == read


@pytest.mark.parametrize(
    "text",
    [
        *("", "2 GFLOP/s", "fast, 1 GB/s", "2 GFLOP/s, 1 GB", "0 FLOP/s, 1 GB/s"),
        *("2 GFLOP/s, 1 GB/s, slower", "2 GFLOP/s, 1 GB/s, 0.5x slower"),
        *("1 GFLOP/s, 1 GB/s, 1e12x slower", "1 GFLOP/s, 1 GB/s 5", "1 GFLOP/s, 5 ms"),
    ],
)
def test_what_is_no_machine_is_refused_with_what_is_one(text: str) -> None:
    with pytest.raises(UsageError, match="GFLOP/s, 100 Mbit/s"):
        VirtualMachine.read(text)


def test_virtual_devices_are_on_the_cpu_also_where_there_are_gpus() -> None:
    options = choose_options(8, **NOTHING, virtual="2 GFLOP/s, 100 Mbit/s")
    assert str(options) == "4 ranks on cpu, gloo, emulated: 2 GFLOP/s, 100 Mbit/s"
    with pytest.raises(UsageError, match="device cpu"):
        ClusterOptions(
            n=2, device="cuda", backend="nccl", threads=1, virtual="2 GFLOP/s, 100 Mbit/s"
        )


def test_names_of_accelerators_and_links_stand_for_what_a_training_reaches() -> None:
    text = with_rates("H100, nvlink4, 1000000x slower")
    assert text == "791.2 TFLOP/s, 370 GB/s 3 us, 1000000x slower"
    assert VirtualMachine.read(text).flops_here == pytest.approx(791.2e6)
    assert with_rates("t4, ethernet10").startswith("48.75 TFLOP/s")  # it has no bfloat16
    assert with_rates("2 GFLOP/s, 100 Mbit/s") == "2 GFLOP/s, 100 Mbit/s"
    assert with_rates("2 GFLOP/s, ib400 1 ms") == "2 GFLOP/s, 47 GB/s 1 ms"


def test_a_slowed_machine_tells_what_is_emulated_here() -> None:
    options = choose_options(0, **NOTHING, virtual="800 TFLOP/s, 1 GB/s 3 us, 1000000x slower")
    assert str(options).endswith(
        "800 TFLOP/s, 8 Gbit/s 3 us, 1000000x slower (here 800 MFLOP/s, 8 kbit/s 3 s)"
    )


def test_links_that_join_no_such_devices_and_hosts_are_refused() -> None:
    with pytest.raises(UsageError, match="is no machine") as caught:
        with_rates("rtx4090, nvlink4")
    assert caught.value.why == "NVIDIA RTX 4090 has no NVLink 4; in a host it takes pcie3, pcie4"
    with pytest.raises(UsageError, match="all virtual links are alike"):
        with_rates("8 h100 nvlink4, 2 hosts ib400, 1000000x slower")


def test_a_latency_is_refused_where_the_tap_that_emulates_it_is_off() -> None:
    with pytest.raises(UsageError, match="the tap, and that is off"):
        choose_options(0, **NOTHING, virtual="2 GFLOP/s, 100 Mbit/s 5 ms", tap="off")
