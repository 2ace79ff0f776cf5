"""The interactive board: what its figures hold, and what is shown where there can be none."""

import base64
import json
import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from typing import Any

import numpy as np
import pytest

from nbdist.client.board import interactive, palette
from nbdist.client.board.interactive import MIME, VIEWS, displays, has_plotly, show_interactive
from nbdist.client.board.look import look
from nbdist.client.board.measures import WIDE
from nbdist.client.board.past import Past
from nbdist.client.board.scene import Scene
from nbdist.client.board.scene_file import from_bytes, to_bytes
from nbdist.client.metrics.recent import recent_steps
from tests.unit.client.board.board_data import analysis_of, cell_info, training

THEME = palette.theme_named("auto")


def finished(ranks: int, steps: int) -> Scene:
    known = analysis_of(ranks, steps, slow=1)
    return replace(look(training(ranks, steps), cell_info(ranks), known), outcome="finished")


def figure(name: str, scene: Scene) -> dict[str, Any]:
    pytest.importorskip("plotly", reason="the extra 'interactive' is not installed")
    from nbdist.client.board.interactive_plots import figure_of

    found = figure_of(name, scene, THEME, 400)
    assert found is not None
    return found


def numbers(packed: Any) -> Any:
    """Return an array of a figure: plotly packs those of numpy."""
    if isinstance(packed, list):
        return np.array(packed)
    return np.frombuffer(base64.b64decode(packed["bdata"]), packed["dtype"])


def test_the_parts_over_the_steps_are_the_boards_parts_of_a_step() -> None:
    telemetry = training(2, 80)
    scene = look(telemetry, cell_info(2))
    stack = scene.stack
    assert stack is not None

    for panel in scene.history:
        means = [line.y[-50:].mean() for line in panel.lines]
        assert means == pytest.approx(list(stack.parts[panel.key]), rel=1e-5)
    whole = np.sum([panel.lines[1].y for panel in scene.history], axis=0)
    assert whole[-50:].mean() == pytest.approx(recent_steps(telemetry.series)[1].step_ms, rel=1e-5)


@pytest.mark.parametrize("name", VIEWS)
def test_a_figure_has_both_sizes_so_that_the_page_does_not_choose_them(name: str) -> None:
    layout = figure(name, finished(2, 60))["layout"]
    assert (layout["width"], layout["height"]) == (WIDE, 400)


def test_many_steps_are_means_of_neighbours_and_sum_to_the_same_time() -> None:
    few, many = look(training(2, 400), cell_info(2)), look(training(2, 5000), cell_info(2))

    assert len(few.history[0].lines[0].x) == 400
    assert len(many.history[0].lines[0].x) == 500
    times = training(2, 5000).series("compute_s")[0].values
    assert many.history[0].lines[0].y.mean() == pytest.approx(1e3 * np.mean(times), rel=1e-5)


def test_a_rank_is_hovered_over_at_the_losses_it_told() -> None:
    scene = finished(2, 80)
    lines = {trace["name"]: trace for trace in figure("loss", scene)["data"]}

    for line in scene.panel("loss").lines:
        trace = lines[f"rank {line.rank}"]
        assert numbers(trace["x"]) == pytest.approx(line.x)
        assert numbers(trace["y"]) == pytest.approx(line.y, rel=1e-6)
    assert {"spread", "rank 0", "rank 1", "mean of all over 3 steps"} == set(lines)


def test_the_list_of_ranks_shows_one_of_them_or_their_mean() -> None:
    scene = finished(3, 60)
    shown = figure("step", scene)
    seen = [button["args"][0]["visible"] for button in shown["layout"]["updatemenus"][1]["buttons"]]

    assert [trace["visible"] for trace in shown["data"]] == seen[0]
    parts = len(scene.history)
    of_rank_1 = [t for t, is_seen in zip(shown["data"], seen[2], strict=True) if is_seen]
    assert len(of_rank_1) == parts
    for trace, panel in zip(of_rank_1, scene.history, strict=True):
        assert numbers(trace["y"]) == pytest.approx(panel.lines[1].y, rel=1e-6)


def test_each_collective_is_a_bar_of_the_length_of_what_it_did() -> None:
    scene = finished(2, 60)
    waiting = next(t for t in figure("collectives", scene)["data"] if t["name"] == "waiting")

    line = scene.analysis.line
    assert line is not None
    lengths = [
        span.arrived_ms - span.begin_ms
        for lane in line.lanes
        for span in lane.spans
        if span.arrived_ms is not None and span.arrived_ms > span.begin_ms
    ]
    assert numbers(waiting["x"]) == pytest.approx(lengths, rel=1e-4)
    assert waiting["customdata"][0] == "1  all_reduce of 25 MB"


@pytest.mark.parametrize(("ranks", "steps"), [(2, 19_000), (16, 3000)])
def test_a_long_training_stays_small_and_is_the_same_from_its_file(ranks: int, steps: int) -> None:
    scene = finished(ranks, steps)
    kept = to_bytes(scene)
    assert kept is not None
    for name in VIEWS:
        content = figure(name, scene)
        assert len(json.dumps(content)) < 700_000
        for trace in content["data"]:
            assert len(numbers(trace["x"])) <= 2000
    assert figure("step", from_bytes(kept)) == figure("step", scene)
    assert figure("collectives", from_bytes(kept)) == figure("collectives", scene)


def test_no_button_sends_the_figure_away() -> None:
    config = figure("loss", finished(2, 60))["config"]
    assert "sendChartToCloud" in config["modeBarButtonsToRemove"]
    assert config["plotlyServerURL"] == ""


def test_an_output_has_the_figure_and_its_picture_and_words_stand_below() -> None:
    pytest.importorskip("plotly", reason="the extra 'interactive' is not installed")
    past = Past(finished(2, 60), THEME, run="careful")

    _, picture, caption, words = displays(past, ("loss",))

    assert set(picture.data) == {MIME, "image/png", "text/plain"}
    assert caption.data["text/plain"] == "Run careful: Loss on 2 ranks over 60 steps."
    assert "Step 60: loss" in words.data["text/plain"]


@pytest.mark.parametrize("found", [None, "5.24.1"])
def test_without_plotly_a_sentence_says_what_to_install_and_the_board_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], found: str | None
) -> None:
    def version(name: str) -> str:
        if found is None:
            raise PackageNotFoundError(name)
        return found

    monkeypatch.setattr(interactive, "version", version)

    show_interactive(Past(finished(2, 60), THEME), "loss", "overview")

    shown = capsys.readouterr().out
    assert 'pip install "plotly>=6"' in shown
    assert "Step 60: loss" in shown


def test_a_view_without_an_interactive_form_says_which_have_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show_interactive(Past(finished(2, 60), THEME), "ranks", "overview")

    shown = capsys.readouterr().out
    assert "ranks has no interactive form: loss, step, collectives have one" in shown
    assert "2 ranks at step 60" in shown


def test_plotly_that_a_program_has_blocked_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    assert not has_plotly()
