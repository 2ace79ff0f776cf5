"""One number over the steps, as a picture that stays shows it."""

from dataclasses import replace

import numpy as np
import pytest

from nbdist.client.board.figure import compose
from nbdist.client.board.palette import theme_named
from nbdist.client.board.scene.look import look
from nbdist.client.metrics.telemetry import Telemetry
from nbdist.shared.wire import Batch, Record
from tests.unit.client.board.board_data import cell_info, training


def test_plots_beside_each_other_begin_and_end_at_the_same_step() -> None:
    telemetry = training(2, 40)
    late = (Record(0, 40 + i, "log", 20 + i, 0, {"accuracy": 0.5}) for i in range(9))
    telemetry.receive(Batch(0, tuple(late)))

    page = compose(look(telemetry, cell_info(2)), theme_named("auto"))

    over_steps = [axes for axes in page.figure.axes if axes.get_xlabel() == "step"]
    assert len(over_steps) == 3
    assert {axes.get_xlim() for axes in over_steps} == {(1.0, 40.0)}


def test_a_mean_follows_a_slope_beyond_the_axis_and_no_single_spike() -> None:
    telemetry = Telemetry()
    losses = [5 * 0.8**step + 1e-3 * (step % 2) for step in range(300)]
    losses[200] = 50.0
    records = [Record(0, i, "step", i + 1, 0, {"loss": loss}) for i, loss in enumerate(losses)]
    telemetry.receive(Batch(0, tuple(records)))

    axes = compose(look(telemetry, cell_info(1)), theme_named("auto"), name="loss").figure.axes[0]

    top = axes.get_ylim()[1]
    strong = max(axes.lines, key=lambda line: line.get_linewidth())
    x, y = np.asarray(strong.get_xdata()), np.asarray(strong.get_ydata())
    assert y[x == 1][0] == pytest.approx(5.0), "no lopsided mean at the begin"
    steep = (x > 1) & (x < 6)
    assert (y[steep] > top).all(), "where the loss is above the axis its mean is, too"
    assert (y[(x > 150) & (x < 250)] < top).all()


def test_what_was_changed_by_hand_is_marked_at_its_step() -> None:
    scene = replace(
        look(training(2, 40), cell_info(2)), marks=((21, "lr 0.1 -> 0.01"),), outcome="finished"
    )

    loss = compose(scene, theme_named("auto"), name="loss").figure.axes[0]

    assert " lr 0.1 -> 0.01" in [text.get_text() for text in loss.texts]
    assert [21, 21] in [np.asarray(line.get_xdata()).tolist() for line in loss.lines]


def test_words_of_marks_beside_each_other_do_not_overlap() -> None:
    marks = tuple((step, "left out") for step in range(20, 24))
    scene = replace(look(training(2, 40), cell_info(2)), marks=marks, outcome="finished")

    loss = compose(scene, theme_named("auto"), name="loss").figure.axes[0]

    heights = [text.get_position()[1] for text in loss.texts if text.get_text() == " left out"]
    assert len(set(heights)) == len(marks)
