"""Machines that nobody has to own: what a text names, and which link an axis crosses."""

import pytest

from nbdist.shared.errors import UsageError
from nbdist.study.accelerators import ACCELERATORS
from nbdist.study.links import LINKS
from nbdist.study.machine import group_of, parse_machine, words_after


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("8 H100", "8 NVIDIA H100 SXM on NVLink 4"),
        ("1 t4", "1 NVIDIA T4"),
        ("4 a10 pcie3", "4 NVIDIA A10 on PCIe 3 x16"),
        (
            "8 h100 nvlink4, 2 hosts ib400",
            "2 hosts of 8 NVIDIA H100 SXM on NVLink 4, 1 x 400 Gbit InfiniBand a host",
        ),
        (
            "8 b200, 4 hosts 8 ib400",
            "4 hosts of 8 NVIDIA B200 SXM on NVLink 5, 8 x 400 Gbit InfiniBand a host",
        ),
    ],
)
def test_a_text_names_accelerators_hosts_and_their_links(text: str, shown: str) -> None:
    assert str(parse_machine(text)) == shown


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("h100", '"h100" does not begin with a number from 1 on'),
        ("0 h100", '"0 h100" does not begin'),
        ("8 h1000", 'no accelerator is called "h1000"; known are t4, v100'),
        ("8 h100 ib400", 'no link in a host is called "ib400"; known are nvlink2'),
        ("8 rtx4090 nvlink4", "NVIDIA RTX 4090 has no NVLink 4; in a host it takes pcie3, pcie4"),
        ("8 t4 pcie4", "NVIDIA T4 has no PCIe 4 x16; in a host it takes pcie3"),
        ("8 h100 nvlink5", "NVIDIA H100 SXM has no NVLink 5; in a host it takes pcie3, pcie4"),
        ("8 h100 nvlink4 fast", '"fast" is one word too many'),
        ("8 h100, 2 ib400", "behind the comma stand hosts and their link"),
        ("8 h100, 2 hosts", "behind the comma stand hosts and their link"),
        ("8 h100, 2 hosts nvlink4", 'no link of hosts is called "nvlink4"; known are ib100'),
        ("8 h100, 2 hosts 0 ib400", "is not a number of hosts and one link"),
        ("8 h100, 2 hosts ib400 ib400", "is not a number of hosts and one link"),
        ("", '"" does not begin with a number'),
    ],
)
def test_a_text_that_names_no_machine_is_told_what_is_right(text: str, why: str) -> None:
    with pytest.raises(UsageError, match="is no machine") as caught:
        parse_machine(text)
    assert why in caught.value.why
    assert "8 h100 nvlink4, 2 hosts ib400" in caught.value.do


@pytest.mark.parametrize(
    ("text", "word"),
    [("8", "h100"), ("8 h100", "nvlink4"), ("8 h100, 2", "hosts"), ("8 h100, 2 hosts 8", "ib400")],
)
def test_the_words_that_may_come_next_are_offered(text: str, word: str) -> None:
    assert word in words_after(text)
    assert words_after("") == words_after("8 h100 nvlink4") == ()


def test_groups_over_axes_are_numbered_as_a_mesh_is() -> None:
    sizes = {"dp": 2, "fsdp": 4, "tp": 2}
    assert group_of("tp", sizes) == [0, 1]
    assert group_of("fsdp", sizes) == [0, 2, 4, 6]
    assert group_of("dp x tp", sizes) == [0, 1, 8, 9]
    assert group_of("pp", sizes) == [0]


def test_an_axis_inside_a_host_has_its_link_alone() -> None:
    machine = parse_machine("8 h100, 2 hosts ib400")
    assert machine.link_of(range(8)) == LINKS["nvlink4"]
    assert machine.link_of([8, 12]) == LINKS["nvlink4"]


def test_groups_between_hosts_share_their_nics() -> None:
    nic = LINKS["ib400"]
    one, eight = (parse_machine(f"8 h100, 2 hosts {n} ib400") for n in (1, 8))
    assert one.link_of(range(16)).bandwidth == nic.bandwidth
    assert one.link_of([0, 8]).bandwidth == nic.bandwidth / 8
    assert eight.link_of([0, 8]).bandwidth == nic.bandwidth
    # No ring is faster than the link that it takes inside a host.
    assert eight.link_of(range(16)).bandwidth == LINKS["nvlink4"].bandwidth
    assert eight.link_of(range(16)).latency_s == nic.latency_s


def test_a_rank_beyond_the_machine_is_refused() -> None:
    with pytest.raises(UsageError, match="no rank 8 on 8 NVIDIA H100"):
        parse_machine("8 h100").link_of([0, 8])


# Bytes and seconds of an all_reduce: github.com/stas00/ml-engineering, network/benchmarks.
@pytest.mark.parametrize(
    ("text", "nbytes", "measured_s"),
    [
        ("8 h200", 2**15, 18.2e-6),
        ("8 h200", 2**20, 24.6e-6),
        ("8 h200", 2**23, 74.7e-6),
        ("8 h200", 2**25, 195e-6),
        ("8 h200", 2**30, 4.03e-3),
        ("8 b200, 4 hosts 8 ib400", 2**15, 98e-6),
        ("8 b200, 4 hosts 8 ib400", 2**30, 5.68e-3),
    ],
)
def test_presets_come_near_what_others_have_measured(
    text: str, nbytes: int, measured_s: float
) -> None:
    machine = parse_machine(text)
    n = machine.world_size
    found_s = machine.link_of(range(n)).collective_s("all_reduce", nbytes, n)
    assert found_s == pytest.approx(measured_s, rel=0.3)  # as links.py says


def test_every_preset_has_a_source_and_a_link_that_exists() -> None:
    assert all(link.name and link.source for link in LINKS.values())
    for one in ACCELERATORS.values():
        assert one.source
        assert one.link in LINKS
        assert one.flops["float32"] <= one.flops["tf32"] <= one.flops["float16"]
        assert 0 < one.share <= 1
