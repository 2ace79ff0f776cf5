import json
import math
from dataclasses import replace

import pytest

from nbdist.client.board import VIEWS, tables, text
from nbdist.client.board.scene.look import look
from nbdist.client.board.scene.scene import Epoch
from nbdist.client.metrics.telemetry import IDLE_S, Telemetry
from nbdist.shared.wire import Batch, Record
from tests.unit.client.board.board_data import analysis_of, cell_info, steps_of, training


def test_a_step_that_was_left_out_is_marked_among_changes() -> None:
    telemetry = training(2, 40)
    change = json.dumps([[21, "lr", "0.1", "0.01", 0.01]])
    for rank in range(2):
        counted = Record(rank, 40, "log", 30, 0, {"left_out": 1.0})
        telemetry.receive(Batch(rank, (counted,), facts={"changes": change}))
    assert look(telemetry, cell_info(2)).marks == ((21, "lr 0.1 -> 0.01"), (30, "left out"))


def logged(ranks: int, rows: int, **values: float) -> Telemetry:
    telemetry = Telemetry()
    for rank in range(ranks):
        records = tuple(Record(rank, i, "log", 0, i, values) for i in range(rows))
        telemetry.receive(Batch(rank, records))
    return telemetry


def test_a_training_shows_loss_communication_and_split() -> None:
    view = look(training(2, 80, total=100), cell_info(2))

    assert [panel.key for panel in view.panels] == ["loss", "comm_s"]
    assert [len(line.x) for line in view.panels[0].lines] == [80, 80]
    assert list(view.recent) == [0, 1]
    assert str(view.epoch) == "80/100 of this epoch"
    assert [row.step for row in view.rows] == [80, 80]


def test_times_are_in_milliseconds_and_shares_in_percent() -> None:
    values = {"step_s": 0.02, "compute_s": 0.01, "comm_s": 0.005, "data_s": 0.005}
    telemetry = Telemetry()
    telemetry.receive(Batch(0, tuple(Record(0, i, "step", i + 1, i, values) for i in range(9))))

    view = look(telemetry, cell_info(1))

    (row,) = view.rows
    assert row.step_ms == pytest.approx(20)
    assert row.steps_per_s == pytest.approx(50)
    assert row.comm_pct == pytest.approx(25)
    assert row.data_pct == pytest.approx(25)
    assert view.panels[0].lines[0].y == pytest.approx(5)


def test_the_first_step_which_connects_everything_is_not_what_now_looks_like() -> None:
    (row, _) = look(training(2, 10), cell_info(2)).rows

    assert row.step_ms is not None
    assert row.step_ms < 30  # the first took 460


def test_ranks_of_verdicts_are_those_that_others_wait_for() -> None:
    slow = look(training(4, 60), cell_info(4), analysis_of(4, slow=2))

    assert slow.slow == {2}
    assert look(training(4, 60), cell_info(4), analysis_of(4)).slow == set()


def test_progress_is_of_the_epoch_that_runs_and_promises_nothing_of_the_loop() -> None:
    telemetry = training(2, 20, total=20)
    first = text.progress(look(telemetry, cell_info(2)), elapsed_s=9)
    assert first.endswith("steps/s] · 20/20 of this epoch, 00:00 left in it")

    for rank in range(2):  # the epoch before was left after 20 of its steps
        telemetry.receive(steps_of(rank, 2, 10, first=21, total=52, began=20))

    view = look(telemetry, cell_info(2))
    assert view.epoch == Epoch(10, 32)
    assert text.progress(view, elapsed_s=9).startswith("30 [00:09, ")
    assert VIEWS["overview"].sentence(view).startswith("Step 30 (10/32 of this epoch), loss")
    over = replace(view, outcome="finished")
    assert VIEWS["overview"].sentence(over).startswith("Step 30, loss")


def test_the_table_names_the_straggler_after_the_numbers() -> None:
    view = look(training(4, 60), cell_info(4), analysis_of(4, slow=1))

    rows = tables.to_html(VIEWS["overview"].table(view)).split("</tr>")
    assert rows[2].endswith("◀ the others wait</td>")
    assert not any("wait" in row for row in (*rows[:2], *rows[3:]))


def test_an_epoch_that_the_steps_have_passed_is_not_shown() -> None:
    assert look(training(2, 30, total=20), cell_info(2)).epoch is None


def test_the_norm_of_the_gradient_is_one_line_of_the_loss_view_where_it_was_measured() -> None:
    telemetry = training(2, 3)
    for rank, share in ((0, 9.0), (1, 16.0)):
        rows = [Record(rank, 3 + i, "step", 4 + i, i, {"grad_share": share}) for i in range(4)]
        telemetry.receive(Batch(rank, tuple(rows)))
    telemetry.receive(Batch(0, (Record(0, 7, "step", 8, 9, {"grad_share": 9.0}),)))

    view = look(telemetry, cell_info(2))

    assert view.norm is not None
    (line,) = view.norm.lines
    assert line.x.tolist() == [4, 5, 6, 7]  # what one rank alone has told is no norm
    assert line.y.tolist() == [5.0] * 4
    assert look(training(2, 3), cell_info(2)).norm is None


@pytest.mark.parametrize(
    ("outcome", "state"),
    [
        ("finished", "finished"),
        ("failed", "ended"),
        ("interrupted", "interrupted"),
        (None, "trains"),
    ],
)
def test_no_rank_trains_on_after_its_cell(outcome: str | None, state: str) -> None:
    view = replace(look(training(2, 30), cell_info(2)), outcome=outcome)

    assert [view.state(row) for row in view.rows] == [state, state]


def test_what_the_user_logs_beside_a_training_gets_at_most_two_plots() -> None:
    telemetry = training(1, 10)
    own = {"lr": 0.1, "accuracy": 0.9, "zebra": 1.0}
    telemetry.receive(Batch(0, tuple(Record(0, 10 + i, "log", i + 1, i, own) for i in range(5))))

    view = look(telemetry, cell_info(1))

    assert [panel.key for panel in view.panels] == ["loss", "comm_s", "accuracy", "lr"]
    assert set(view.rows[0].own) == set(own)


def test_numbers_logged_without_an_optimizer_are_plotted_by_row() -> None:
    view = look(logged(2, 6, reward=1.0), cell_info(2))

    assert view.panels[0].lines[0].x.tolist() == [1, 2, 3, 4, 5, 6]


def test_a_rank_that_has_said_nothing_is_in_the_table_and_slows_nothing() -> None:
    telemetry = Telemetry()
    telemetry.receive(steps_of(0, 2, 5))

    view = look(telemetry, cell_info(2))

    assert [row.step for row in view.rows] == [5, 0]
    assert view.first_step == 5
    assert "–" in tables.to_html(VIEWS["overview"].table(view))


@pytest.mark.parametrize(
    ("outcome", "sentence"),
    [
        ("finished", "Loss and communication time on 2 ranks over 80 steps."),
        ("failed", "Loss and communication time on 2 ranks, failed after 80 steps."),
        ("interrupted", "Loss and communication time on 2 ranks, interrupted after 80 steps."),
    ],
)
def test_the_caption_says_what_is_seen_and_how_it_ended(outcome: str, sentence: str) -> None:
    assert text.caption(look(training(2, 80), cell_info(2)), outcome) == sentence


def test_the_caption_of_one_rank_and_one_step_is_singular() -> None:
    view = look(training(1, 1), cell_info(1))

    assert text.caption(view, "finished").endswith("on 1 rank over 1 step.")


def test_the_caption_of_a_cell_that_only_logs_counts_its_records() -> None:
    view = look(logged(2, 6, val_accuracy=0.5), cell_info(2))

    sentence = text.caption(view, "finished")

    assert sentence == "val_accuracy on 2 ranks over 6 records."
    assert text.markdown(sentence).startswith("val\\_accuracy")


def test_the_caption_holds_no_trained_number() -> None:
    def run(seed: int) -> str:
        telemetry = Telemetry()
        for rank in range(2):
            telemetry.receive(steps_of(rank, 2, 30, seed=seed))
        return text.caption(look(telemetry, cell_info(2)), "finished")

    assert run(1) == run(2)


def test_the_spoken_line_names_step_loss_communication_and_straggler() -> None:
    sentence = VIEWS["overview"].sentence(
        look(training(4, 60, total=100), cell_info(4), analysis_of(4, slow=1))
    )

    assert sentence.startswith("Step 60 (60/100 of this epoch), loss 1.")
    assert "% of a step in communication" in sentence
    assert sentence.endswith("rank 1 makes the others wait.")


def test_a_loss_that_is_not_finite_is_said_with_its_rank() -> None:
    telemetry = training(2, 5)
    telemetry.receive(Batch(1, (Record(1, 5, "step", 6, 0, {"loss": math.nan}),)))

    assert "loss not finite on rank 1" in VIEWS["overview"].sentence(look(telemetry, cell_info(2)))


def test_losses_that_are_not_finite_are_said_with_all_their_ranks_and_equal_ones_once() -> None:
    def told(*losses: float) -> Telemetry:
        telemetry = Telemetry()
        for rank, loss in enumerate(losses):
            telemetry.receive(Batch(rank, (Record(rank, 0, "step", 1, 0, {"loss": loss}),)))
        return telemetry

    both = look(told(math.nan, math.inf), cell_info(2))
    assert "loss not finite on ranks 0-1" in VIEWS["overview"].sentence(both)
    alike = look(told(1.0001, 1.0002), cell_info(2))
    assert VIEWS["loss"].sentence(alike) == "Step 1: loss 1.00."


def test_progress_reads_like_tqdm_and_names_the_last_rank() -> None:
    telemetry = training(2, 20, total=100)
    telemetry.receive(steps_of(0, 2, 79, first=21, total=100))

    line = text.progress(look(telemetry, cell_info(2)), elapsed_s=75)

    assert line.startswith("20 [01:15, ")
    assert "steps/s] · 20/100 of this epoch, 00:0" in line
    assert line.endswith("ranks at 20–99, rank 1 is last")


def test_a_training_that_stands_still_is_told_no_time_that_is_left() -> None:
    view = look(training(2, 20, total=100), cell_info(2))
    assert view.idle_s < IDLE_S
    goes, stands = (
        text.progress(replace(view, idle_s=idle_s), elapsed_s=75) for idle_s in (1.0, 12.0)
    )
    assert "steps/s" in goes
    assert goes.endswith("left in it")
    assert stands == "20 [01:15] · 20/100 of this epoch · no step for 00:12"
    # Steps of 20 s each are no standstill.
    slow = replace(view, idle_s=12.0, rows=tuple(replace(r, steps_per_s=0.05) for r in view.rows))
    assert text.progress(slow, elapsed_s=75).endswith("left in it")


def test_a_pause_is_no_standstill_and_is_over_with_the_next_step() -> None:
    view = replace(look(training(2, 20, total=100), cell_info(2)), idle_s=12.0, paused_at=20)
    assert text.progress(view, 75) == "20 [01:15] · 20/100 of this epoch · paused after step 20"
    assert not view.stands_still
    went_on = replace(view, paused_at=19)
    assert not went_on.is_paused
    assert went_on.stands_still


def test_ranks_whose_reports_are_a_moment_apart_are_told_as_abreast() -> None:
    telemetry = training(2, 20, total=100)
    telemetry.receive(steps_of(0, 2, 3, first=21, total=100))

    line = text.progress(look(telemetry, cell_info(2)), elapsed_s=75)

    assert line.endswith("left in it")


def test_names_from_outside_are_escaped_in_html() -> None:
    telemetry = logged(1, 2, **{"<script>": 1.0})

    assert "<script>" not in tables.to_html(VIEWS["overview"].table(look(telemetry, cell_info(1))))


@pytest.mark.parametrize("name", VIEWS)
def test_without_lines_a_scene_says_the_same(name: str) -> None:
    telemetry, info, known = training(3, 60), cell_info(3), analysis_of(3, slow=1)

    whole, part = look(telemetry, info, known), look(telemetry, info, known, histories=False)

    assert part.panels == ()
    assert part.paces is None
    assert VIEWS[name].sentence(part) == VIEWS[name].sentence(whole)
    if name != "loss":  # which is a table of its lines
        assert VIEWS[name].table(part) == VIEWS[name].table(whole)
