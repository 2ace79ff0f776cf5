"""Lines through measured messages."""

import pytest

from nbdist.study.fit import fit

SIZES = (8, 4096, *(65536 * 4**i for i in range(6)))


@pytest.mark.parametrize("latency_s", [2e-6, 1e-4, 1e-2])
@pytest.mark.parametrize("bandwidth", [1e6, 1e9, 4e11])
def test_a_fit_finds_latency_and_bandwidth_that_were_planted(
    latency_s: float, bandwidth: float
) -> None:
    found = fit([(size, latency_s + size / bandwidth) for size in SIZES])
    assert found.latency_s == pytest.approx(latency_s)
    assert found.bandwidth == pytest.approx(bandwidth, rel=1e-3)
    assert found.worst < 0.01
    assert found.time_s(1e6) == pytest.approx(latency_s + 1e6 / bandwidth, rel=0.01)


def test_a_burst_that_a_limited_link_lets_through_is_no_bandwidth_and_is_told() -> None:
    latency_s, bandwidth, burst = 5e-5, 40e6, 100_000
    points = [(n, latency_s + max(n / 1e9, (n - burst) / bandwidth)) for n in SIZES]
    found = fit(points)
    assert found.bandwidth == pytest.approx(bandwidth, rel=0.01)
    assert found.worst_at == 65536
    assert 0.9 < found.worst < 1


def test_one_message_that_took_longer_is_told_and_does_not_move_the_line() -> None:
    points = [(n, 1e-4 + n / 1e9) for n in SIZES]
    points[4] = (SIZES[4], 1.5 * points[4][1])
    found = fit(points)
    assert found.off < 0.01
    assert found.worst == pytest.approx(0.5, rel=0.1)
    assert found.worst_at == SIZES[4]
    assert found.bandwidth == pytest.approx(1e9, rel=0.01)


def test_one_size_makes_no_line() -> None:
    with pytest.raises(ValueError, match="two sizes"):
        fit([(8, 1e-5), (8, 2e-5)])
