"""Forecasts of planted steps: parts are recovered, and what is far is known less well."""

from dataclasses import replace

import pytest

from nbdist.shared.errors import UsageError
from nbdist.study.forecast import fit
from nbdist.study.links import Link
from nbdist.study.scaling import Call, Kind, World
from nbdist.study.step_time import StepTime
from tests.unit.study.planted import FIXED_S, LINK, OVERLAP, planted

KINDS = pytest.mark.parametrize("kind", ["strong", "weak"])


@KINDS
def test_one_and_two_ranks_tell_the_step_of_more(kind: Kind) -> None:
    model = fit([planted(1, kind), planted(2, kind)], kind)
    for n in (4, 8, 64):
        assert model.predict(n).step_s == pytest.approx(planted(n, kind).step_s, rel=1e-6)


@KINDS
def test_one_and_two_ranks_tell_the_step_over_another_link(kind: Kind) -> None:
    other = Link(2e-5, 5e9, "a fast one")
    found = fit([planted(1, kind), planted(2, kind)], kind).predict(8, other)
    assert found.step_s == pytest.approx(planted(8, kind, link=other).step_s, rel=1e-6)
    assert found.link is other


def test_link_overlap_and_serial_part_are_recovered() -> None:
    model = fit([planted(1, "strong"), planted(2, "strong")], "strong")
    assert model.link.latency_s == pytest.approx(LINK.latency_s)
    assert model.link.bandwidth == pytest.approx(LINK.bandwidth)
    assert model.overlap == pytest.approx(OVERLAP)
    assert model.fixed_s == pytest.approx(FIXED_S)


@KINDS
def test_steps_off_by_their_noise_lie_within_the_band(kind: Kind) -> None:
    """Measured means off by 3 %, as of 10 steps that spread by a tenth."""
    for first, second in ((1.03, 0.97), (0.97, 1.03), (1.03, 1.03)):
        noisy = [_off(planted(1, kind), first), _off(planted(2, kind), second)]
        for n in (4, 8):
            found = fit(noisy, kind).predict(n)
            assert abs(found.step_s - planted(n, kind).step_s) < found.error_s


def _off(world: World, times: float) -> World:
    time = world.time
    parts = {name: getattr(time, name) * times for name in StepTime.__slots__}
    return replace(world, time=StepTime(**parts), spread_s=0.1 * world.step_s)


def test_the_band_widens_with_distance() -> None:
    model = fit([planted(1, "weak"), planted(2, "weak")], "weak")
    errors = [model.predict(n).error_s / model.predict(n).step_s for n in (2, 4, 8, 64)]
    assert errors == sorted(errors)
    assert errors[0] < errors[-1] / 2


def test_efficiency_of_a_forecast_is_that_of_the_measured_base() -> None:
    found = fit([planted(1, "strong"), planted(2, "strong")], "strong").predict(4)
    assert found.efficiency == pytest.approx(planted(1, "strong").step_s / 4 / found.step_s)
    assert found.samples_s == pytest.approx(64 / found.step_s)


def test_shards_shrink_where_they_were_seen_to() -> None:
    step = StepTime(0.1, 0.01)
    sharded = [World(n, step, calls=(Call("all_gather", 1000 // n, n, 1),)) for n in (1, 2)]
    whole = [World(n, step, calls=(Call("all_gather", 1000, n, 1),)) for n in (1, 2)]
    assert fit(sharded, "weak").shrinking == ("all_gather",)
    assert fit(whole, "weak").shrinking == ()


def test_worlds_that_wait_for_cores_are_left_out() -> None:
    crowded = replace(planted(4, "weak"), cores=2, starved_s=0.05)
    assert fit([planted(1, "weak"), planted(2, "weak"), crowded], "weak").last.n == 2
    with pytest.raises(UsageError, match="two numbers of ranks with a core for each"):
        fit([planted(1, "weak"), crowded], "weak")
