"""Records in, points out: what a run's curves are made of."""

import math

from hypothesis import given
from hypothesis import strategies as st

from nbdist.client.metrics.analysis.values import ExplainedStep
from nbdist.client.tracking.flat import flat_values, spread
from nbdist.client.tracking.series import LAG_S, MOST_TIMINGS, Point, RunSeries
from nbdist.shared.wire import Record

MS = 1_000_000


def step(rank: int, n: int, time_ms: int = 0, **values: float) -> Record:
    if "comm_s" in values:
        values = {"compute_s": 0.0, **values}
    return Record(rank, n - 1, "step", n, (time_ms or n) * MS, values)


def logged(rank: int, n: int, time_ms: int = 1, **values: float) -> Record:
    return Record(rank, 0, "log", n, time_ms * MS, values)


def values_of(points: list[Point], key: str) -> list[tuple[int, float]]:
    return [(p.step, p.values[key]) for p in points if key in p.values]


def test_the_mean_loss_appears_when_the_last_rank_has_made_the_step() -> None:
    series = RunSeries((0, 1))
    first = series.add([step(0, 1, loss=1.0)])
    assert values_of(first, "rank_loss/00") == [(1, 1.0)]
    assert values_of(first, "loss") == []
    assert values_of(series.add([step(1, 1, loss=3.0)]), "loss") == [(1, 2.0)]


def test_each_training_of_a_cell_has_its_own_last_loss() -> None:
    series = RunSeries((0, 1))
    for rank in (0, 1):
        for fold in (1.0, 2.0, 3.0):
            began = fold if fold > 1 else 0.0
            series.add([step(rank, int(2 * fold - 1), loss=9.0, training_began=began)])
            series.add([step(rank, int(2 * fold), loss=fold + rank)])
    assert series.losses_before == [1.5, 2.5]
    assert series.last["loss"] == 3.5


def test_the_last_loss_of_a_training_is_what_the_user_logs_by_that_name() -> None:
    series = RunSeries((0,))
    series.add([step(0, 1, loss=9.0), logged(0, 1, loss=0.5), step(0, 2, loss=9.0)])
    series.add([step(0, 3, loss=9.0, training_began=2.0)])
    assert series.losses_before == [0.5]


def test_a_point_carries_the_time_of_its_rank() -> None:
    points = RunSeries((0, 1)).add([step(0, 1, 1000, loss=1.0), step(1, 1, 1007, loss=1.0)])
    assert [p.time_ms for p in points] == [1000, 1007, 1007]


def test_what_recent_steps_are_like_has_a_point_when_it_has_changed() -> None:
    series = RunSeries((0,))
    series.add([step(0, 3, 70, loss=1.0)])
    (point,) = series.recent({"step_ms": 12.0})
    assert (point.time_ms, point.step, point.values) == (70, 3, {"step_ms": 12.0})
    assert series.recent({"step_ms": 12.0}) == []
    (later,) = series.recent({"step_ms": 13.0})
    assert (later.time_ms, later.step) == (71, 3)  # of one step MLflow shows the later one
    assert series.last["step_ms"] == 13.0


def test_what_the_user_logs_by_the_name_of_a_number_is_what_they_mean() -> None:
    series = RunSeries((0,))
    series.add([logged(0, 1, step_ms=5.0)])
    assert series.recent({"step_ms": 12.0}) == []
    assert series.last["step_ms"] == 5.0


def test_a_rank_that_stays_silent_holds_the_others_up_only_so_long() -> None:
    series = RunSeries((0, 1))
    series.add([step(0, 1, loss=1.0)], now_s=10.0)
    later = series.add([step(0, 2, loss=1.0)], now_s=10.1 + LAG_S)
    assert values_of(later, "loss") == [(1, 1.0)]
    late = series.add([step(1, 1, loss=9.0)])
    assert values_of(late, "rank_loss/01") == [(1, 9.0)]
    assert values_of(late, "loss") == []


def test_a_rank_whose_clock_is_an_hour_off_is_waited_for_like_any_other() -> None:
    series, hour_ms = RunSeries((0, 1)), 3_600_000
    assert values_of(series.add([step(0, 1, loss=1.0)], now_s=10.0), "loss") == []
    early = series.add([step(0, 2, hour_ms, loss=1.0)], now_s=10.1)
    assert values_of(early, "loss") == []
    points = series.add([step(1, 1, loss=3.0), step(1, 2, loss=3.0)], now_s=10.2)
    assert values_of(points, "loss") == [(1, 2.0), (2, 2.0)]


def test_of_thousands_of_steps_a_second_some_have_points_the_same_of_all_ranks() -> None:
    series, points = RunSeries((0, 1)), []
    for begin in range(1, 20_000, 250):
        for rank in (1, 0):  # a step takes 0.5 ms, and one rank's clock is a minute off
            for n in range(begin, begin + 250):
                times = {"step_s": 5e-4, "compute_s": 4e-4} if n % 16 == 0 else {"step_s": 5e-4}
                points += series.add(
                    [step(rank, n, n // 2 + 60_000 * rank, loss=float(n), **times)]
                )
    points += series.finish()
    known = values_of(points, "loss")
    assert known[:100] == [(n, float(n)) for n in range(1, 101)]
    assert 100 < len([n for n, _ in known if n > 18_000]) < 300
    assert all(loss == n for n, loss in known)
    assert known[-1] == (20_000, 20_000.0)
    timed = [n for n, _ in values_of(points, "rank_step_ms/01")]
    assert timed == [n for n, _ in values_of(points, "rank_step_ms/00")]
    a_second = len([n for n in timed if n > 18_000])
    assert MOST_TIMINGS / 2 <= a_second <= 2 * MOST_TIMINGS


def test_the_last_step_has_all_its_points_beside_a_loss_that_it_had_before() -> None:
    series, points = RunSeries((0, 1)), []
    for n in range(1, 1502):
        for rank in (0, 1):
            times = {"step_s": 0.01, "compute_s": 0.008, "comm_s": 0.002}
            points += series.add([step(rank, n, 10 * n, loss=float(n), **times)])
    points += series.finish()
    assert [n for n, _ in values_of(points, "loss")] == list(range(1, 1502))
    for key in ("rank_loss/01", "rank_comm_ms/00"):
        steps = [n for n, _ in values_of(points, key)]
        assert steps[-1] == 1501, key
        assert len(steps) == len(set(steps)) < 150, key


def test_steps_of_ten_milliseconds_all_have_their_loss() -> None:
    series = RunSeries((0,))
    points = series.add([step(0, n, 10 * n, loss=1.0) for n in range(1, 2001)])
    assert len(values_of(points, "loss")) == 2000


def test_the_end_closes_steps_that_wait_for_a_rank() -> None:
    series = RunSeries((0, 1))
    series.add([step(0, 1, loss=4.0)])
    assert values_of(series.finish(), "loss") == [(1, 4.0)]


def test_what_the_user_logs_is_the_mean_over_the_ranks_that_logged_it() -> None:
    series = RunSeries((0, 1))
    series.add([logged(0, 3, accuracy=0.5)])
    assert values_of(series.add([logged(1, 3, accuracy=1.0)]), "accuracy") == [(3, 0.75)]


def test_logging_without_an_optimizer_counts_the_calls_as_steps() -> None:
    series = RunSeries((0,))
    points = series.add([logged(0, 0, t, score=float(t)) for t in (1, 2, 3)])
    assert values_of(points, "score") == [(0, 1.0), (1, 2.0), (2, 3.0)]


def test_the_users_own_loss_takes_the_place_of_the_automatic_one() -> None:
    series = RunSeries((0,))
    points = series.add([logged(0, 1, loss=7.0), step(0, 1, loss=1.0)])
    assert values_of(points, "loss") == [(1, 7.0)]
    assert values_of(points, "rank_loss/00") == [(1, 1.0)]


def test_more_than_16_ranks_become_least_median_greatest_and_who() -> None:
    series = RunSeries(range(17))
    points = series.add([step(r, 1, loss=float(r)) for r in range(17)])
    (point,) = points
    assert point.values["rank_loss/max"] == 16
    assert point.values["rank_loss/argmax"] == 16
    assert point.values["rank_loss/median"] == 8
    assert not any(key.startswith("rank_loss/0") for key in point.values)


def test_a_rank_whose_loss_is_no_number_is_the_one_named() -> None:
    values = spread("loss", {0: 1.0, 1: math.nan, 2: 5.0})
    assert values["rank_loss/argmax"] == 1
    assert values["rank_loss/median"] == 3


def test_what_was_explained_of_a_step_is_its_waiting_and_its_skew() -> None:
    series = RunSeries((0, 1))
    explained = ExplainedStep(1, {0: 30.0, 1: 0.0}, {0: 5.0, 1: 5.0}, skew_ms=31.0, last=1)
    found = series.add_explained([explained])
    assert values_of(found, "skew_ms") == [(1, 31.0)]
    assert values_of(found, "rank_wait_ms/00") == [(1, 30.0)]


def test_the_gradients_norm_needs_every_ranks_share() -> None:
    assert flat_values({0: {"grad_share": 9.0}, 1: {"grad_share": 16.0}})["grad_norm"] == 5
    assert "grad_norm" not in flat_values({0: {"grad_share": 9.0}, 1: {"loss": 1.0}})


def test_the_imbalance_of_experts_is_the_share_of_the_busiest_rank() -> None:
    even = {"expert_even": 400.0}
    ranks = {0: {"expert_tokens": 240.0, **even}, 1: {"expert_tokens": 560.0, **even}, 2: {}}
    assert flat_values(ranks) == {"expert_imbalance": 1.4}  # rank 2's stage has no mixture


def test_a_rank_without_a_loader_has_no_data_time() -> None:
    points = RunSeries((0, 1)).add([step(0, 1, data_s=0.0), step(1, 1, data_s=0.5)])
    assert values_of(points, "rank_data_ms/01") == [(1, 500.0)]
    assert values_of(points, "rank_data_ms/00") == []


def test_above_16_ranks_waiting_has_extremes_too() -> None:
    series = RunSeries(range(64))
    waiting = {rank: float(rank) for rank in range(64)}
    (point,) = series.add_explained([ExplainedStep(3, waiting, waiting)])
    assert point.values["rank_wait_ms/max"] == 63
    assert point.values["rank_wait_ms/argmax"] == 63
    assert len(point.values) == 4


def test_losses_that_explode_both_ways_do_not_stop_the_run() -> None:
    points = RunSeries((0, 1)).add([step(0, 1, loss=math.inf), step(1, 1, loss=-math.inf)])
    assert math.isnan(values_of(points, "loss")[0][1])


def test_a_resumed_run_goes_on_after_its_last_step() -> None:
    series = RunSeries((0,), first_step=40)
    assert values_of(series.add([step(0, 1, loss=1.0)]), "loss") == [(41, 1.0)]
    assert series.last_step == 41
    assert series.steps == 1


@given(st.permutations([(rank, n) for rank in range(3) for n in range(1, 6)]))
def test_each_step_gives_one_flat_point_in_whatever_order_the_ranks_come(
    order: list[tuple[int, int]],
) -> None:
    series = RunSeries((0, 1, 2))
    points = [p for rank, n in order for p in series.add([step(rank, n, loss=float(rank))])]
    points += series.finish()
    assert sorted(values_of(points, "loss")) == [(n, 1.0) for n in range(1, 6)]
    assert sum("rank_loss/01" in p.values for p in points) == 5


def device(rank: int, second: float, **values: float) -> Record:
    return Record(rank, 0, "device", 7, round(1e9 * (1000 + second)), values)


def test_what_devices_do_has_thin_series_by_rank_that_end_with_the_newest() -> None:
    series = RunSeries((0, 1))
    told = [device(1, s, device_pct=s / 1000, device_bytes=3e9) for s in range(36_000)]
    points = [*series.add(told), *series.finish()]

    use = values_of(points, "rank_device_pct/01")

    assert 1000 < len(use) < 4000  # ten hours
    assert use[0] == (7, 0.0)
    assert use[-1] == (7, 35.999)
    assert {v for _, v in values_of(points, "rank_device_mb/01")} == {3000.0}


def test_devices_of_many_ranks_have_no_series() -> None:
    series = RunSeries(range(17))
    points = series.add([device(rank, 0.0, cpu_pct=90.0) for rank in range(17)])

    assert [*points, *series.finish()] == []


def test_of_many_ranks_the_last_step_has_all_its_points_too() -> None:
    ranks = range(17)
    series, points = RunSeries(ranks), []
    for n in range(1, 202):
        for rank in ranks:
            times = {"step_s": 0.01, "compute_s": 0.008, "comm_s": 0.002}
            points += series.add([step(rank, n, 10 * n, loss=float(n), **times)])
    points += series.finish()
    assert values_of(points, "loss") == [(n, float(n)) for n in range(1, 202)]
    assert [n for n, _ in values_of(points, "rank_loss/max")][-1] == 201
    assert [n for n, _ in values_of(points, "rank_comm_ms/median")][-1] == 201
