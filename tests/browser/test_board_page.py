"""What the board's page shows and does, by itself: a real browser, real records, no kernel."""

import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from nbdist.client.board import VIEWS
from nbdist.client.board.live.explained import ExplainedLines
from nbdist.client.board.live.points import PointStream
from nbdist.client.board.palette import contrast
from nbdist.client.metrics.analysis.values import ExplainedStep
from nbdist.client.metrics.detail import Detail
from nbdist.client.metrics.telemetry import Telemetry
from nbdist.shared.wire import Batch, Record
from tests.browser.board_page import BoardPage
from tests.unit.client.board.board_data import (
    analysis_of,
    cell_info,
    devices_of,
    steps_of,
    training,
)

pytestmark = pytest.mark.browser

Open = Callable[..., BoardPage]


@pytest.fixture
def opened(browser: Browser) -> Iterator[Open]:
    """Opens boards of trainings; closes them."""
    pages: list[BoardPage] = []

    def open_(telemetry: Telemetry, ranks: int = 2, **more: Any) -> BoardPage:
        stream = more.pop("stream", None) or PointStream(telemetry)
        known = more.pop("known", analysis_of(ranks, slow=1 if ranks > 1 else None))
        pages.append(BoardPage(browser, telemetry, cell_info(ranks), stream.whole(), known, **more))
        return pages[-1]

    yield open_
    for page in pages:
        page.close()


def test_the_pointer_tells_the_values_of_all_ranks_at_that_step(opened: Open) -> None:
    telemetry = training(3, 200)
    board = opened(telemetry, 3)

    board.point_at("loss", 0.5)

    step = board.ask("page.cursor")
    assert 95 <= step <= 105
    tip = board.page.locator("figure .nb-tip:visible").inner_text()
    assert tip.splitlines()[0] == f"step {step:.0f}"
    losses = [telemetry.series("loss")[rank].values[int(step) - 1] for rank in range(3)]
    assert [float(line.split()[-1]) for line in tip.splitlines()[1:]] == pytest.approx(
        losses, rel=6e-3
    )
    assert board.ask("page.plots.map(plot => plot.at)") == [step, step], "in all plots"
    board.point_at("communication", 0.5)
    assert "ms" in board.page.locator("figure .nb-tip:visible").inner_text()


def test_the_mean_of_all_ranks_is_drawn_over_their_losses(opened: Open) -> None:
    telemetry = training(3, 60)
    board = opened(telemetry, 3, view="loss")
    mean = board.ask("[...page.plots[0].subject.mean().y.subarray(0, 60)]")
    losses = [telemetry.series("loss")[rank].values[:60] for rank in range(3)]
    assert mean == pytest.approx([sum(of) / 3 for of in zip(*losses, strict=True)])


def test_new_points_move_the_lines_and_a_gap_is_asked_for(opened: Open) -> None:
    telemetry = training(2, 50)
    stream = PointStream(telemetry)
    stream.take()
    board = opened(telemetry, stream=stream)

    for rank in range(2):
        telemetry.receive(steps_of(rank, 2, 10, first=51))
    new = stream.take()
    board.tell("points", new)
    board.tell("points", new)  # a page may be told twice
    assert board.ask("page.steps()") == [1, 60]
    assert board.ask("page.lines.of('loss').get(1).n") == 60
    assert board.sent == []

    for rank in range(2):
        telemetry.receive(steps_of(rank, 2, 10, first=61))
    stream.take()  # is lost
    for rank in range(2):
        telemetry.receive(steps_of(rank, 2, 10, first=71))
    board.tell("points", stream.take())
    assert board.sent == [{"kind": "whole"}]
    assert board.ask("page.lines.of('loss').get(1).n") == 60, "no line with a hole"
    board.tell("points", stream.whole())
    assert board.ask("page.lines.of('loss').get(1).n") == 80


def test_dragging_zooms_all_plots_and_what_was_thinned_is_fetched(opened: Open) -> None:
    telemetry = training(1, 9000)
    board = opened(telemetry, 1)
    assert board.ask("page.lines.isThinned")

    board.drag("loss", 0.25, 0.5)

    low, high = board.ask("page.zoom")
    assert (low, high) == pytest.approx((2250, 4500), abs=30)
    assert board.ask("page.plots.map(plot => plot.range)") == [[low, high]] * 2
    [asked] = [said for said in board.sent if said["kind"] == "range"]
    assert asked == {"kind": "range", "low": low, "high": high}
    words = board.page.locator(".nb-range")
    steps = f"steps {math.ceil(low):,} to {math.floor(high):,}"
    assert words.inner_text() == f"{steps}: thinned, peaks kept"
    board.tell("range", PointStream(telemetry).between(low, high), low=low, high=high, lost="")
    assert words.inner_text() == steps
    board.point_at("loss", 0.5)
    step = board.ask("page.cursor")
    shown = board.ask("page.plots[0].values()[0].y")
    assert shown == pytest.approx(telemetry.series("loss")[0].values[int(step) - 1])

    board.page.get_by_role("button", name="Whole run").click()
    board.drawn()
    assert board.ask("page.plots[0].range") == [1, 9000]
    assert board.ask("page.lines.detail") is None
    assert words.is_hidden()


def long_run(steps: int, detail: Detail | None) -> tuple[Telemetry, list[float]]:
    """Return a training of one rank, and its losses: noise, which thinning cannot keep."""
    draw, telemetry = random.Random(0), Telemetry(detail=detail)
    losses = [draw.gauss(10.0, 1.0) for _ in range(steps)]
    for at in range(0, steps, 1000):
        rows = enumerate(losses[at : at + 1000], start=at)
        telemetry.receive(
            Batch(0, tuple(Record(0, i, "step", i + 1, 0, {"loss": loss}) for i, loss in rows))
        )
    return telemetry, losses


def test_a_zoom_into_a_long_run_shows_the_values_that_its_line_has_lost(
    opened: Open, tmp_path: Path
) -> None:
    telemetry, losses = long_run(200_000, Detail(tmp_path))
    stream, board = PointStream(telemetry), opened(telemetry, 1)
    kept = telemetry.series("loss")[0]
    in_memory = set(kept.steps[: kept.n])

    board.drag("loss", 0.3, 0.31)

    low, high = board.ask("page.zoom")
    board.tell("range", stream.between(low, high), low=low, high=high, lost="")
    seen = []
    for share in (0.03, 0.21, 0.4, 0.55, 0.77, 0.98):
        board.point_at("loss", share)
        step = int(board.ask("page.cursor"))
        seen.append(step)
        tip = board.page.locator("figure .nb-tip:visible").inner_text()
        assert tip.splitlines()[0] == f"step {step:,}"
        assert float(tip.split()[-1]) == pytest.approx(losses[step - 1], rel=6e-3)
        assert board.ask("page.plots[0].values()[0].y") == pytest.approx(losses[step - 1], rel=1e-7)
    assert len(set(seen) - in_memory) >= 4, "the history in memory has lost most of them"
    shown = board.ask("[...page.lines.of('loss', page.zoom).get(0).x.subarray(0, 1e4)]")
    assert [x for x in shown if x][: int(high) - math.ceil(low) + 1] == [
        float(step) for step in range(math.ceil(low), int(high) + 1)
    ]
    assert (
        board.page.locator(".nb-range").inner_text() == f"steps {math.ceil(low):,} to {int(high):,}"
    )
    board.picture("page-zoomed")


def test_a_range_that_is_still_too_long_says_that_a_narrower_one_has_the_rest(
    opened: Open, tmp_path: Path
) -> None:
    telemetry, _ = long_run(50_000, Detail(tmp_path))
    board = opened(telemetry, 1)
    board.drag("loss", 0.1, 0.6)
    low, high = board.ask("page.zoom")
    board.tell("range", PointStream(telemetry).between(low, high), low=low, high=high, lost="")
    said = board.page.locator(".nb-range").inner_text()
    assert said.endswith(": thinned, peaks kept; zoom in for the rest")


def test_points_that_are_not_kept_are_said_beside_the_zoom(opened: Open) -> None:
    telemetry, _ = long_run(50_000, None)
    board = opened(telemetry, 1)
    board.drag("loss", 0.1, 0.12)
    low, high = board.ask("page.zoom")
    points = PointStream(telemetry).between(low, high)
    board.tell("range", points, low=low, high=high, lost=points.lost)
    said = board.page.locator(".nb-range").inner_text()
    assert said.endswith(": thinned, peaks kept; the rest was not kept")


def test_a_board_without_its_records_asks_for_nothing_and_says_what_it_lacks(opened: Open) -> None:
    telemetry, _ = long_run(50_000, None)
    board = opened(telemetry, 1, frame={"lost": "the board of a run keeps no more"})
    board.drag("loss", 0.1, 0.12)
    assert board.sent == []
    said = board.page.locator(".nb-range").inner_text()
    assert said.endswith(": thinned, peaks kept; the board of a run keeps no more")


def test_what_is_thinned_while_it_is_zoomed_is_fetched_and_once(opened: Open) -> None:
    telemetry = training(1, 3000)
    stream = PointStream(telemetry)
    stream.take()
    board = opened(telemetry, 1, stream=stream)
    board.drag("loss", 0.25, 0.5)
    assert not any(said["kind"] == "range" for said in board.sent)

    for first in range(3001, 20_001, 1000):  # a page keeps 16,000 points of a line
        telemetry.receive(steps_of(0, 1, 1000, first=first))
        board.tell("points", stream.take())

    low, high = board.ask("page.zoom")
    asked = [said for said in board.sent if said["kind"] == "range"]
    assert asked == [{"kind": "range", "low": low, "high": high}]


def test_a_rank_is_hidden_by_a_click_and_the_scale_is_logarithmic_by_another(opened: Open) -> None:
    board = opened(training(2, 100))

    board.page.get_by_role("button", name="rank 1").click()
    board.page.get_by_role("button", name="log", exact=True).click()
    board.drawn()

    assert board.ask("page.plots[0].shown.map(([rank]) => rank)") == [0]
    assert board.ask("page.plots[0].scale.isLog")
    board.page.get_by_role("button", name="rank 1").click()
    board.drawn()
    assert board.ask("page.plots[0].shown.length") == 2


def test_all_views_are_there_without_asking_the_kernel(opened: Open) -> None:
    telemetry = training(4, 80)
    telemetry.receive(devices_of(0, 9, gpu=True))
    board = opened(telemetry, 4)

    for name in VIEWS:
        board.page.get_by_role("radio", name=name).click()
        board.drawn()
        assert board.page.get_by_role("radio", name=name).get_attribute("aria-checked") == "true"
        assert board.page.locator(".nb-view *, .nb-step *").count() > 0, name
        board.picture(f"page-{name}")
    assert board.sent == [{"kind": "view", "name": name} for name in VIEWS]
    board.page.get_by_role("radio", name="ranks").click()
    board.page.locator("figcaption:text('device temperature')").wait_for()


def test_the_pointer_on_a_step_tells_what_it_was_made_of_and_who_waited(opened: Open) -> None:
    telemetry, explained = Telemetry(), ExplainedLines()
    for rank in range(2):
        parts = [{"step_s": 0.02, "compute_s": 0.01, "comm_s": 0.006, "loss": 1.0}] * 20
        for at in range(1, 20, 2):
            parts[at] = {"step_s": 0.02, "loss": 1.0}  # is not measured
        records = [Record(rank, i, "step", i + 1, 0, v) for i, v in enumerate(parts)]
        telemetry.receive(Batch(rank, tuple(records)))
    explained.add([ExplainedStep(11, {0: 5.0, 1: 0.0}, {0: 1.0, 1: 6.0}, 5.0, last=1)])
    board = opened(telemetry, stream=PointStream(telemetry, explained))

    board.point_at("loss", 10 / 19)
    said = board.page.locator(".nb-step").inner_text()
    assert said.startswith("At step 11 rank 0 waited 5 ms for rank 1.")
    assert "waiting" in said
    pieces = board.page.locator(".nb-step .nb-row").first.locator(".nb-piece")
    told = [piece.get_attribute("title") for piece in pieces.all()]
    assert told == [
        "rank 0: compute 10 ms", "rank 0: transfer 1 ms", "rank 0: waiting 5 ms",
        "rank 0: other 4 ms",
    ]  # fmt: skip

    board.page.wait_for_function("() => window.board.sent.some(said => said.kind === 'step')")
    assert board.sent == [{"kind": "step", "step": 11}]
    line = board.ask("page.words.line")
    board.tell("step", step=11, line=line)
    board.page.locator("figcaption:text('its collectives')").wait_for()
    board.tell("step", step=11, line=None)
    assert "Its collectives are not kept." in board.page.locator(".nb-step").inner_text()

    board.point_at("loss", 1)
    said = board.page.locator(".nb-step").inner_text()
    assert said.startswith("Step 20 was not measured. At step 19, who waited for whom was not")
    board.page.mouse.move(0, 0)
    board.drawn()
    assert "mean of the last 50" in board.page.locator(".nb-step").inner_text()


def test_a_keyboard_and_a_screen_reader_walk_through_the_steps(opened: Open) -> None:
    telemetry = training(2, 50)
    board = opened(telemetry)
    plot = board.plot("loss")
    plot.focus()

    board.page.keyboard.press("Home")
    board.page.keyboard.press("ArrowRight")
    board.drawn()

    assert plot.get_attribute("aria-valuenow") == "2"
    said = plot.get_attribute("aria-valuetext") or ""
    first, second, third = said.split(", ")
    assert (first, second.split()[:2], third.split()[:2]) == (
        "step 2",
        ["rank", "0"],
        ["rank", "1"],
    )
    assert float(third.split()[2]) == pytest.approx(telemetry.series("loss")[1].values[1], rel=6e-3)
    board.page.keyboard.press("End")
    board.page.keyboard.press("+")
    board.drawn()
    assert board.ask("page.zoom[1]") == 50
    board.page.keyboard.press("Escape")
    board.drawn()
    assert board.ask("page.zoom") is None
    assert board.page.locator(".nb-status").inner_text().startswith("Step 50")


def test_a_run_of_a_million_steps_stays_small_and_keeps_its_spikes(opened: Open) -> None:
    telemetry = training(1, 3)
    board = opened(telemetry, 1)

    most, spike = board.page.evaluate(
        """() => {
          const lines = window.board.page.lines;
          let first = lines.of('loss').get(0).until;
          while (first < 1e6) {
            const data = new Float32Array(2000);
            for (let i = 0; i < 1000; i += 1) data[i] = first + i + 1;
            data.fill(1, 1000);
            if (first < 500000 && first + 1000 >= 500000) data[1500] = 99;
            lines.take([['loss', 0, 0, first, first + 1000, 1000]], new DataView(data.buffer));
            first += 1000;
          }
          const line = lines.of('loss').get(0);
          return [line.x.length, Math.max(...line.y.subarray(0, line.n))];
        }"""
    )

    assert most <= 65_536
    assert spike == 99


def test_what_is_logged_without_steps_is_counted(opened: Open) -> None:
    telemetry = Telemetry()
    for rank in range(2):
        records = [Record(rank, i, "log", 0, 0, {"accuracy": i / 8}) for i in range(8)]
        telemetry.receive(Batch(rank, tuple(records)))
    board = opened(telemetry, known=None)

    assert board.ask("page.plots[0].range") == [1, 8]
    board.point_at("accuracy", 1)
    assert "0.875" in board.page.locator(".nb-tip:visible").inner_text()


def test_what_was_changed_by_hand_stands_at_its_step(opened: Open) -> None:
    board = opened(training(2, 41))
    words = board.ask("page.words")
    board.tell("words", words=words | {"marks": [[21, "lr 0.1 -> 0.01"]]})
    board.point_at("loss", 0.5)
    tip = board.page.locator("figure .nb-tip:visible").inner_text()
    assert tip.splitlines()[0] == "step 21, lr 0.1 -> 0.01"
    board.picture("page-change")


def test_jupyters_keys_do_nothing_while_the_board_is_used(opened: Open) -> None:
    board = opened(training(2, 20))
    # JupyterLab's own word for elements that keep their keys.
    for where in ("canvas", "select", "input", "[role=radio]"):
        assert board.page.locator(where).first.evaluate(
            "e => Boolean(e.closest('[data-lm-suppress-shortcuts]'))"
        ), where


def test_text_that_is_selected_stays_until_it_was_copied(opened: Open) -> None:
    board = opened(training(2, 20))
    words = board.ask("page.words")
    select = "() => getSelection().selectAllChildren(document.querySelector('.nb-table table'))"
    board.page.evaluate(select)
    board.tell("words", words=words | {"progress": "99 [00:59]"})
    board.tell("texts", texts=[{"data": {"text/plain": "new"}}])
    assert "Ranks, over their last steps" in board.page.evaluate("String(getSelection())")

    board.page.evaluate("getSelection().removeAllRanges()")
    board.tell("words", words=words | {"progress": "100 [01:00]"})
    assert board.page.locator(".nb-progress").inner_text() == "100 [01:00]"
    board.tell("texts", texts=[{"data": {"text/plain": "newer"}}])
    assert board.page.locator(".nb-texts").inner_text() == "newer"


def test_a_pause_is_shown_as_long_as_it_lasts(opened: Open) -> None:
    board = opened(training(2, 20))
    words = board.ask("page.words")
    pause = board.page.get_by_role("button", name="Pause")
    pause.click()
    assert board.sent == [{"kind": "ask", "what": "pause", "rank": -1}]
    assert board.page.locator(".nb-remark").inner_text() == "Waiting for the end of a step …"
    board.tell("taken")
    board.tell("words", words=words | {"paused": True})
    assert pause.get_attribute("aria-pressed") == "true"
    board.tell("words", words=words)
    assert pause.get_attribute("aria-pressed") == "false"


def test_an_answer_is_shown_where_it_was_asked_for(opened: Open) -> None:
    board = opened(training(2, 20))
    board.tell("answer", title="Stacks at 12:00:00", text="rank 0: x", page="another page")
    assert board.page.locator(".nb-answer").is_hidden()
    board.tell("answer", title="Stacks at 12:00:00", text="rank 0: x", page=board.ask("page.id"))
    assert "rank 0: x" in board.page.locator(".nb-answer").inner_text()
    board.page.get_by_role("button", name="Cost").click()
    assert board.page.locator(".nb-answer").is_hidden(), "an older answer"


def test_a_notebook_is_saved_when_its_prints_have_moved_into_the_board_and_once(
    opened: Open,
) -> None:
    count = "document.addEventListener('nbdist-board-opened', () => window.opened += 1)"
    board = opened(training(2, 20), script=f"window.opened = 0; {count}")
    assert board.page.evaluate("window.opened") == 0
    for _ in range(2):
        board.tell("texts", texts=[])
    assert board.page.evaluate("window.opened") == 1


def test_a_loss_that_is_not_finite_leaves_a_gap_and_ends_nothing(opened: Open) -> None:
    telemetry = Telemetry()
    values = [1.0, math.nan, 3.0, math.inf, 2.0]
    telemetry.receive(
        Batch(0, tuple(Record(0, i, "step", i + 1, 0, {"loss": v}) for i, v in enumerate(values)))
    )
    board = opened(telemetry, 1)

    board.point_at("loss", 0.25)
    assert "nan" in board.page.locator(".nb-tip:visible").inner_text()
    said = board.page.get_by_role("alert").inner_text()
    assert said == "The loss of rank 0 is not finite since step 2."
    assert board.ask("page.plots[0].scale.limits[1]") < 4


NOTICES = """
  window.noticed = [];
  window.Notification = class {
    constructor(title, options) { window.noticed.push(options.body); }
    static permission = 'default';
    static requests = 0;
    static async requestPermission() {
      window.Notification.requests += 1;
      window.Notification.permission = 'granted';
    }
  };
  const kept = {};
  Object.defineProperty(window, 'localStorage', {value: {
    getItem: key => kept[key] ?? null, setItem: (key, value) => { kept[key] = value; },
  }});
"""


def test_notices_come_when_they_were_asked_for_and_once(opened: Open) -> None:
    telemetry = training(2, 20)
    board = opened(telemetry, script=NOTICES)
    stream = PointStream(telemetry)
    stream.take()
    telemetry.receive(Batch(1, (Record(1, 20, "step", 21, 0, {"loss": math.nan}),)))

    board.page.get_by_role("button", name="Notify me").click()
    board.tell("points", stream.take())
    words = board.ask("page.words")
    for _ in range(2):
        board.tell(
            "words", words=words | {"stands_still": True, "progress": "20 · no step for 00:09"}
        )
    board.tell("words", words=words | {"outcome": "failed"})

    assert board.page.evaluate("window.Notification.requests") == 1
    assert board.page.evaluate("window.noticed") == [
        "The loss of rank 1 is not finite since step 21.",
        "The ranks stand still: 20 · no step for 00:09",
        "The training has failed.",
    ]


def test_without_consent_there_is_no_notice(opened: Open) -> None:
    board = opened(training(2, 20), script=NOTICES)
    board.tell("words", words=board.ask("page.words") | {"outcome": "finished"})
    assert board.page.evaluate("[window.Notification.requests, window.noticed.length]") == [0, 0]


def test_prints_are_shown_with_their_colours_and_nothing_of_them_is_run(opened: Open) -> None:
    board = opened(training(2, 20))

    board.tell(
        "texts",
        texts=[{"data": {"text/plain": "a\x1b[31mred\x1b[0m<img src=x onerror=boom()>\x1b[2K"}}],
    )

    assert board.page.locator(".nb-texts").inner_text() == "ared<img src=x onerror=boom()>"
    assert board.page.locator(".nb-texts img").count() == 0
    color = board.page.get_by_text("red", exact=True).evaluate("e => getComputedStyle(e).color")
    assert color == "rgb(204, 51, 51)"


def test_each_expert_has_a_cell_in_the_strip_of_its_mixture(opened: Open) -> None:
    telemetry = training(2, 80)
    for rank in (0, 1):
        tokens = {f"layers.{layer}.mlp:{2 * rank + i}": 7.0 + i for layer in (0, 1) for i in (0, 1)}
        telemetry.receive(Batch(rank, (Record(rank, 1000, "experts", 80, 80, tokens),)))
    board = opened(telemetry, view="ranks")
    cells = board.page.locator(".nb-strips .nb-piece").evaluate_all("all => all.map(e => e.title)")
    assert len(cells) == 8
    assert cells[3] == "expert 3 on rank 1: 8 tokens"
    assert board.page.locator(".nb-strips .nb-value").first.inner_text() == (
        "most 8: rank 0, expert 1"
    )
    assert board.page.locator(".nb-strips .nb-next-rank").count() == 2


@pytest.mark.parametrize("width", [600, 1000, 2000])
def test_nothing_is_cut_and_nothing_scrolls(opened: Open, width: int) -> None:
    telemetry = training(8, 80)
    board = opened(telemetry, 8, width=width)
    for name in VIEWS:
        board.page.get_by_role("radio", name=name).click()
        board.drawn()
        assert board.page.evaluate("document.documentElement.scrollWidth") <= width, name
        cut = board.page.evaluate(
            """() => [...document.querySelectorAll('.nbdist-board *')].filter(e =>
              !e.closest('table, .nb-tip, .nb-status') && e.checkVisibility() &&
              e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML)"""
        )
        assert cut == [], name
        board.picture(f"page-{name}-{width}")


@pytest.mark.parametrize("is_dark", [False, True])
def test_words_are_readable_on_both_themes(opened: Open, is_dark: bool) -> None:
    board = opened(training(2, 80), is_dark=is_dark)
    board.point_at("loss", 0.4)
    ground = "#111" if is_dark else "#fff"
    for where in (".nb-progress span", "figcaption", "td", "button[aria-checked=true]"):
        color = board.page.locator(where).first.evaluate("e => getComputedStyle(e).color")
        as_hex = "#" + "".join(f"{int(part):02x}" for part in color.strip("rgba()").split(",")[:3])
        assert contrast(as_hex, ground) >= 4.5, where
    board.picture(f"page-{'dark' if is_dark else 'light'}")
