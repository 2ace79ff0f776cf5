"""What a machine that nobody has yet would do."""

import pytest

from nbdist.study.machine import parse_machine
from nbdist.study.preset import PresetProbe, median_rates


def lines(text: str, here: dict[str, float]) -> list[str]:
    return str(PresetProbe(parse_machine(text), here)).splitlines()


def test_a_machine_is_labelled_as_a_preset_and_its_sources_are_named() -> None:
    shown = lines("8 h100 nvlink4, 2 hosts ib400", {"float32": 5e10, "bfloat16": 1e11})
    assert shown[0] == (
        "2 hosts of 8 NVIDIA H100 SXM on NVLink 4, 1 x 400 Gbit InfiniBand a host: 86 GB each. "
        "From presets: nothing of it was measured."
    )
    at = shown.index("Sources:")
    assert [line.split(":")[0].strip() for line in shown[at + 1 :]] == [
        *("NVIDIA H100 SXM", "NVLink 4", "400 Gbit InfiniBand"),
    ]


def test_all_reduces_are_told_inside_a_host_over_all_and_between_hosts() -> None:
    shown = lines("8 h100 nvlink4, 2 hosts ib400", {})
    assert shown[1].split("  ")[0] == "all_reduce"
    assert [line.split()[0] for line in shown[2:5]] == ["1.0", "25", "1.0"]
    probe = PresetProbe(parse_machine("8 h100 nvlink4, 2 hosts ib400"), {})
    # 2 GB x 7/8 over 370 GB/s; x 15/16 over one NIC of 47; x 1/2 over an eighth of it.
    assert probe.all_reduce_s(10**9, range(8)) == pytest.approx(1.75 / 370, rel=0.01)
    assert probe.all_reduce_s(10**9, range(16)) == pytest.approx(1.875 / 47, rel=0.01)
    assert probe.all_reduce_s(10**9, [0, 8]) == pytest.approx(1 / (47 / 8), rel=0.01)


def test_computing_is_compared_with_the_ranks_here() -> None:
    shown = [line.split() for line in lines("8 h100", {"float32": 5.36e10, "bfloat16": 1e11})]
    assert ["bfloat16", "989", "TFLOP/s", "791", "TFLOP/s", "100", "GFLOP/s", "7,912"] in shown
    assert ["float32", "67.0", "TFLOP/s", "53.6", "TFLOP/s", "53.6", "GFLOP/s", "1,000"] in shown
    assert any(" ".join(line).startswith("Large matmuls reach 80 % of") for line in shown)


def test_without_ranks_there_is_nothing_to_compare_with() -> None:
    shown = lines("1 t4", {})
    assert "%dist start, and it is compared with the ranks here." in shown[-3]
    assert "Large matmuls are assumed to reach 75 % of the data sheet." in shown[-3]
    assert not any("all_reduce" in line or "bfloat16" in line for line in shown)


def test_ranks_are_compared_by_their_median() -> None:
    rates = {0: {"float32": 1.0}, 1: {"float32": 9.0}, 2: {"float32": 2.0}}
    assert median_rates(rates) == {"float32": 2.0}
    assert median_rates({}) == {}
