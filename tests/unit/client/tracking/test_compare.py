"""What differs between runs, and who wins."""

import math
import random
import statistics
from array import array
from typing import Any

import pytest

from nbdist.client.board.drawn.compare_plot import picture
from nbdist.client.board.palette import theme_named
from nbdist.client.metrics.telemetry import Series
from nbdist.client.tracking.curves import MOST_POINTS, curves_of, joined
from nbdist.client.tracking.past.compare import (
    Comparison,
    Entry,
    Figure,
    entry_of,
    judge,
    mean_over_ranks,
    rows_of,
    sum_over_ranks,
    what_differs,
)


def history(values: list[float], first: int = 1) -> Series:
    steps = array("d", range(first, first + len(values)))
    return Series(steps, array("d", values), len(values), 0, len(values), sum(values))


def entry(name: str, loss: float, error: float | None = 0.01, state: str = "finished") -> Entry:
    return Entry(name, state, 10, {"lr": name}, Figure(loss, error), None)


def test_an_error_bar_is_two_standard_errors_over_the_ranks() -> None:
    values = [1.0, 2.0, 4.0, 5.0]
    figure = mean_over_ranks({str(rank): value for rank, value in enumerate(values)})
    assert figure is not None
    assert figure.value == 3
    assert figure.error == pytest.approx(2 * statistics.stdev(values) / math.sqrt(4))


def test_throughput_is_that_of_all_ranks_and_its_error_grows_with_them() -> None:
    figure = sum_over_ranks({"0": 90.0, "1": 110.0})
    assert figure is not None
    assert figure.value == 200
    assert figure.error == pytest.approx(2 * 2 * statistics.stdev([90, 110]) / math.sqrt(2))


def test_a_loss_that_is_no_number_is_left_out_and_one_rank_has_no_error() -> None:
    assert mean_over_ranks({"0": None, "1": 2.0}) == Figure(2.0, None)
    assert mean_over_ranks({"0": None}) is None


def test_the_winner_is_named_with_the_next_best() -> None:
    said = Comparison((entry("a", 0.5), entry("b", 0.3), entry("c", 0.4))).sentences
    assert said == ("b has the lowest loss: 0.3 ± 0.01, against 0.4 ± 0.01 of c.",)


def test_runs_whose_error_bars_overlap_have_no_clear_winner() -> None:
    figures = [("a", Figure(0.31, 0.02)), ("b", Figure(0.33, 0.02)), ("c", Figure(0.9, 0.01))]
    assert judge(figures, "the lowest loss", "loss", lowest=True) == (
        "No clear winner in loss: the error bars of a (0.31 ± 0.02) and b (0.33 ± 0.02) overlap."
    )


def test_runs_are_called_equal_when_all_of_them_are() -> None:
    figures = [("a", Figure(2.0, 0.1)), ("b", Figure(2.0, 0.1))]
    assert judge(figures, "the lowest loss", "loss", lowest=True) == (
        "No clear winner in loss: a and b are equal (2 ± 0.1)."
    )
    said = judge([*figures, ("c", Figure(2.1, 0.1))], "the lowest loss", "loss", lowest=True)
    assert said.endswith("a (2 ± 0.1), b (2 ± 0.1) and c (2.1 ± 0.1) overlap.")
    many = [(f"r{n}", Figure(2.0, None)) for n in range(6)]
    assert judge(many, "the lowest loss", "loss", lowest=True) == (
        "No clear winner in loss: r0, r1, r2, r3 and 2 more are equal (2)."
    )


def test_what_failed_cannot_win() -> None:
    table = Comparison((entry("a", 0.5), entry("b", 0.4), entry("c", 0.1, state="failed")))
    assert table.sentences[0].startswith("b has the lowest loss")


def test_one_rank_wins_without_a_claim_of_certainty() -> None:
    table = Comparison((entry("a", 0.5, None), entry("b", 0.4, None)))
    assert table.sentences[0].endswith("One rank has no error bar, so the uncertainty is unknown.")


def test_only_what_differs_is_shown() -> None:
    facts = [{"lr": "1", "layout": "ddp"}, {"lr": "1", "layout": "fsdp", "torch": "2.13"}]
    assert what_differs(facts) == ["layout", "torch"]


def test_a_comparison_reads_as_a_table_and_as_rows_for_a_program() -> None:
    table = Comparison((entry("0.1", 0.5), entry("0.2", 0.3)))
    assert str(table).splitlines()[:3] == [
        "run  lr   state     steps  loss",
        "0.1  0.1  finished  10     0.5 ± 0.01",
        "0.2  0.2  finished  10     0.3 ± 0.01",
    ]
    assert "<td>0.3 ± 0.01</td>" in table._repr_html_()
    assert rows_of(table.entries)[1]["loss_error"] == 0.01


def test_a_curve_keeps_the_mean_and_the_range_of_the_ranks() -> None:
    series = {"loss": {0: history([4.0, 2.0]), 1: history([6.0, 2.0])}}
    kept = curves_of(lambda key: series.get(key, {}), first_step=10)
    assert kept["loss"] == [[11, 5.0, 4.0, 6.0], [12, 2.0, 2.0, 2.0]]
    assert kept["end"]["loss"] == {"0": 2.0, "1": 2.0}


def test_a_long_curve_is_thinned_and_its_mean_stays() -> None:
    values = [float(i % 7) for i in range(70_000)]
    kept = curves_of(lambda key: {0: history(values)} if key == "loss" else {})
    assert len(kept["loss"]) <= MOST_POINTS
    assert statistics.fmean(row[1] for row in kept["loss"]) == pytest.approx(3, abs=0.05)


def test_a_loss_that_explodes_leaves_a_hole_and_no_number() -> None:
    kept = curves_of(lambda key: {0: history([1.0, math.nan])} if key == "loss" else {})
    assert kept["loss"] == [[1, 1.0, 1.0, 1.0], [2, None, None, None]]
    assert entry_of("a", "finished", 2, {}, kept).loss is None


def test_throughput_is_each_ranks_usual_samples_over_its_usual_step() -> None:
    series = {"step_s": {0: history([9.0, 0.1, 0.1])}, "samples": {0: history([8.0, 8.0, 8.0])}}
    kept = curves_of(lambda key: series.get(key, {}))
    assert kept["end"]["samples_per_s"] == {"0": pytest.approx(80)}


def test_a_run_that_goes_on_has_one_curve_and_its_own_end() -> None:
    before = {"loss": [[1, 3.0, 3.0, 3.0]], "end": {"loss": {"0": 3.0}}}
    own = {"loss": [[2, 1.0, 1.0, 1.0]], "end": {"loss": {"0": 1.0}}}
    whole = joined(before, own)
    assert [row[0] for row in whole["loss"]] == [1, 2]
    assert whole["end"] == own["end"]


@pytest.mark.parametrize("theme", ["auto", "light", "dark"])
def test_the_picture_is_drawn_for_many_runs_and_few_figures(theme: str) -> None:
    curve: list[list[float | None]] = [
        [1, 2.0, 1.5, 2.5],
        [2, None, None, None],
        [3, 0.001, 0.001, 0.002],
    ]
    with_both = Entry("a" * 40, "finished", 3, {}, Figure(1, 0.1), Figure(9, 1.0), curve=curve)
    png = picture([with_both] * 10, theme_named(theme))
    assert png.startswith(b"\x89PNG")
    only_speed = Entry("b", "finished", 3, {}, None, Figure(9, None))
    assert picture([only_speed], theme_named(theme)).startswith(b"\x89PNG")


def noisy(level: float, seed: int, steps: int, ranks: int = 2) -> dict[str, Any]:
    """Return the curves of ranks that all see the same batches."""
    chance = random.Random(seed)
    values = [level + chance.gauss(0, 0.03) for _ in range(steps)]
    series = {"loss": {rank: history(values) for rank in range(ranks)}}
    return curves_of(lambda key: series.get(key, {}))


def test_noise_has_no_winner_where_ranks_see_the_same_batches() -> None:
    for seed in range(0, 200, 4):
        runs = [
            entry_of(str(i), "finished", 20, {}, noisy(2.3, seed + i, steps=20)) for i in range(4)
        ]
        (said,) = Comparison(tuple(runs)).sentences
        assert said.startswith("No clear winner in loss"), (seed, said)


def test_a_true_difference_wins_with_an_error_bar_from_the_steps() -> None:
    curves = {name: noisy(level, 1 + (name == "b"), 200) for name, level in (("a", 2.3), ("b", 2))}
    table = Comparison(tuple(entry_of(n, "finished", 200, {}, c) for n, c in curves.items()))
    assert table.sentences[0].startswith("b has the lowest loss: ")
    values = [row[1] for row in curves["a"]["loss"][-50:]]
    standard_error = statistics.stdev(values) / math.sqrt(50)
    loss = table.losses[0]
    assert loss is not None
    assert loss.value == pytest.approx(statistics.fmean(values))
    assert loss.error == pytest.approx(2 * standard_error, rel=0.1)


def test_runs_of_different_lengths_are_compared_over_the_steps_that_all_have_made() -> None:
    falling = [3.0 - 0.1 * i for i in range(20)]

    def kept(steps: int) -> dict[str, Any]:
        return curves_of(lambda key: {0: history(falling[:steps])} if key == "loss" else {})

    table = Comparison(
        (
            entry_of("a", "finished", 20, {}, kept(20)),
            entry_of("b", "interrupted", 15, {}, kept(15)),
        )
    )
    a, b = table.losses
    assert a is not None
    assert b is not None
    assert a.value == b.value == pytest.approx(statistics.fmean(falling[8:15]))
    assert "has the lowest" not in str(table)
    assert "Loss is the mean of steps 9 to 15; 15 is the last step all runs reached." in (
        str(table)
    )


def test_a_run_that_failed_early_does_not_shorten_the_comparison() -> None:
    entries = [
        entry_of("a", "finished", 40, {}, noisy(2, 1, 40)),
        entry_of("b", "finished", 40, {}, noisy(2, 2, 40)),
        entry_of("c", "failed", 3, {}, noisy(2, 3, 3)),
    ]
    table = Comparison(tuple(entries))
    assert "Loss is the mean of steps 21 to 40." in str(table)
    assert "A failed run that stopped earlier shows its own last steps." in str(table)


def test_a_few_steps_decide_nothing() -> None:
    entries = [entry_of(n, "finished", 4, {}, noisy(v, 1, 4)) for n, v in (("a", 2), ("b", 1))]
    (said,) = Comparison(tuple(entries)).sentences
    assert said == "No clear winner in loss: step 4 is too little data."


def test_a_thinned_curve_is_compared_over_as_many_steps_as_its_error_needs() -> None:
    kept = noisy(2.0, 1, 20_000)
    window = Comparison((entry_of("a", "finished", 20_000, {}, kept),)).window
    assert window is not None
    assert 10 * 50 <= window.last - window.first + 1 <= 600


def test_a_step_that_is_long_now_and_then_counts_in_throughput_and_mean() -> None:
    times = [0.01 + 0.2 * (i % 10 == 9) for i in range(100)]
    series = {"step_s": {0: history(times)}, "samples": {0: history([32.0] * 100)}}
    end = curves_of(lambda key: series.get(key, {}))["end"]
    assert end["step_ms"] == {"0": pytest.approx(30)}
    assert end["samples_per_s"] == {"0": pytest.approx(32 / 0.03)}
