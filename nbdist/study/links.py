"""Links between ranks, and the time that messages take on them: plain numbers.

The model is that of Hockney (1994): a message of n bytes takes latency + n / bandwidth.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from nbdist.shared.collectives import rounds, sent_bytes
from nbdist.study.estimate import Traffic


@dataclass(frozen=True, slots=True)
class Link:
    """Between two ranks, in one direction.

    Attributes:
        latency_s: Of a message without content.
        bandwidth: Bytes a second that one rank sends.
        name: As people write it: "NVLink 4".
        source: Where the figures come from.
    """

    latency_s: float
    bandwidth: float
    name: str = ""
    source: str = ""

    def time_s(self, sent: Traffic) -> float:
        """Return the seconds of collectives whose messages all go over this link."""
        return sent.rounds * self.latency_s + sent.nbytes / self.bandwidth

    def collective_s(self, kind: str, nbytes: int, n: int, backend: str = "nccl") -> float:
        """Return the seconds of one collective of `n` ranks, each of which puts `nbytes` in."""
        nsent = sent_bytes(kind, nbytes, n, backend)
        return self.time_s(Traffic(1, nbytes, nsent, rounds(kind, n, backend), n))


_BOOK = "Bekman, Machine Learning Engineering, github.com/stas00/ml-engineering"
_BENCH = f"{_BOOK}, network/benchmarks"
_NCCL = "github.com/NVIDIA/nccl"
_TESTS = "github.com/NVIDIA/nccl-tests"


def _nic(word: str, gbit: float, share: float, latency_s: float, source: str) -> tuple[str, Link]:
    kinds = {"ib": "InfiniBand", "roce": "RoCE", "efa": "EFA", "ethernet": "Ethernet"}
    name = f"{gbit:g} Gbit {kinds[word]}"
    return f"{word}{gbit:g}", Link(latency_s, share * gbit * 1e9 / 8, name, source)


# By the word that users write. Bandwidth is busbw of nccl-tests: what a ring of collectives
# reaches, and not the line's rate. Latency is the time of a short all_reduce over its rounds
# (2 log2 n), with kernels and proxies; a program that waits for each call adds 20 to 30 us of
# PyTorch's own (_BENCH). What stands between hosts is one NIC, in one direction.
#
# Measured times (_BENCH) over those of this line: on 8 H200 0.77 to 1.37 (32 KiB to 16 GiB); on 32
# B200 of 4 hosts 0.98 to 1.34 up to 128 KiB and from 128 MiB on, and up to 2.7 between (16 MiB),
# where NCCL changes its algorithm.
LINKS: Final[Mapping[str, Link]] = {
    "nvlink2": Link(
        *(4e-6, 120e9, "NVLink 2"),
        "assumed: 80 % of 150 GB/s, the share that NVLink 3 reaches, and its latency",
    ),
    "nvlink3": Link(
        *(4e-6, 235e9, "NVLink 3"),
        f"8 A100: 235 GB/s, {_BOOK}, network; 233 GB/s, {_NCCL}/issues/1048. Latency assumed",
    ),
    "nvlink4": Link(
        *(3e-6, 370e9, "NVLink 4"),
        f"8 H200: 368 GB/s in rings, 18 us for 32 KiB, {_BENCH}. An all_reduce of 1 GB and more is "
        "a fifth faster where the switch reduces (NVLS)",
    ),
    "nvlink5": Link(
        *(4e-6, 720e9, "NVLink 5"),
        f"B200: 722 GB/s is what NCCL counts with, {_NCCL}/issues/1807; 839 GB/s by NVLS and 26 us "
        f"for 32 KiB, {_BENCH}",
    ),
    "xgmi": Link(
        *(5e-6, 313e9, "Infinity Fabric"),
        f"8 MI300X: 313 GB/s (2 of them: 48 GB/s), {_BOOK}, network. Latency assumed",
    ),
    "pcie3": Link(
        *(7e-6, 12e9, "PCIe 3 x16"),
        f"what NCCL counts with, {_NCCL}, src/graph/topo.h (PCI_BW). Latency as PCIe 4's",
    ),
    "pcie4": Link(
        *(7e-6, 24e9, "PCIe 4 x16"),
        "4 RTX 4090 with peer-to-peer: 26 GB/s, half without it, github.com/tinygrad/"
        f"open-gpu-kernel-modules/issues/36. 8 of them: 43 us for 8 bytes, {_NCCL}/issues/1530",
    ),
    "pcie5": Link(
        *(7e-6, 35e9, "PCIe 5 x16"),
        f"4 RTX 5090: 35 GB/s, 8: 28 GB/s, {_NCCL}/issues/1639. Latency as PCIe 4's",
    ),
    **dict(
        (
            _nic("ib", 100, 0.94, 8e-6, "assumed: the share and latency of 400 Gbit"),
            _nic(
                "ib",
                200,
                0.96,
                8e-6,
                f"one NIC: 24 GB/s, {_NCCL}/issues/1048; 10 us a round, {_TESTS}/issues/150",
            ),
            _nic(
                "ib",
                400,
                0.94,
                8e-6,
                f"32 B200, 8 NICs a host: 377 GB/s, 98 us for 32 KiB, "
                f"{_BENCH}; 16 H20: 47 us, {_NCCL}/issues/1244",
            ),
            _nic("ib", 800, 0.94, 8e-6, "assumed: the share and latency of 400 Gbit"),
            _nic(
                "roce",
                100,
                0.75,
                15e-6,
                f"8 NICs a host: 75 %, {_NCCL}/issues/495. Latency as 200 Gbit's",
            ),
            _nic(
                "roce",
                200,
                0.75,
                15e-6,
                "assumed: the share of 100 Gbit. 30 us for 8 KiB on 2 "
                "ranks, github.com/NVIDIA/dgx-spark-playbooks/pull/103",
            ),
            _nic("roce", 400, 0.75, 15e-6, "assumed: the share of 100 Gbit, the latency of 200"),
            _nic(
                "efa", 100, 0.85, 15e-6, f"4 NICs a host: 85 %, {_BOOK}, network. Latency as RoCE's"
            ),
            _nic("ethernet", 1, 0.94, 50e-6, "TCP in packets of 1,500 bytes. Latency assumed"),
            _nic("ethernet", 10, 0.94, 50e-6, "TCP in packets of 1,500 bytes. Latency assumed"),
            _nic(
                "ethernet",
                25,
                0.6,
                50e-6,
                f"TCP at 32 Gbit: 60 %, {_NCCL}/issues/209. Latency assumed",
            ),
            _nic(
                "ethernet",
                100,
                0.4,
                50e-6,
                f"TCP: 4 to 6 GB/s, {_NCCL}/issues/450. Latency assumed",
            ),
        )
    ),
}

BETWEEN_HOSTS: Final = tuple(word for word, link in LINKS.items() if "Gbit" in link.name)
INSIDE_HOSTS: Final = tuple(word for word in LINKS if word not in BETWEEN_HOSTS)
