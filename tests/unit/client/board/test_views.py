"""Every view of the board: its picture, its table, its sentence."""

import io
import math
import pkgutil
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.text import Text
from PIL import Image

from nbdist.client.board import VIEWS, palette, sentences, tables, text, views
from nbdist.client.board.drawn.measures import NARROW, WIDE
from nbdist.client.board.drawn.page import Page
from nbdist.client.board.drawn.plots import lines
from nbdist.client.board.figure import compose, draw
from nbdist.client.board.scene.look import look
from nbdist.client.board.scene.scene import Curve, Scene
from nbdist.client.board.views.collectives import group_names
from nbdist.client.metrics.analysis.values import Analysis, RankStep, Straggler
from nbdist.client.metrics.telemetry import Telemetry
from nbdist.shared.text import figure
from nbdist.shared.wire import Batch, Record
from tests.unit.client.board.board_data import analysis_of, cell_info, steps_of, training


def seen(ranks: int = 4, steps: int = 60, slow: int | None = None) -> Scene:
    return look(training(ranks, steps), cell_info(ranks), analysis_of(ranks, steps, slow=slow))


def png(name: str, view: Scene, *, theme: str = "light") -> np.ndarray:
    drawn = draw(view, palette.theme_named(theme), name=name)
    return np.asarray(Image.open(io.BytesIO(drawn)).convert("RGBA"))


class Cells(HTMLParser):
    """The cells of an HTML table, and how its headers are marked."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.scopes: list[str | None] = []
        self.rows: list[list[str]] = []
        self.captions = 0
        self._is_cell = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.captions += tag == "caption"
        if tag == "tr":
            self.rows.append([])
        if tag == "th":
            self.scopes.append(dict(attrs).get("scope"))
        if tag in ("th", "td"):
            self._is_cell = True
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self._is_cell = self._is_cell and tag not in ("th", "td")

    def handle_data(self, data: str) -> None:
        if self._is_cell:
            self.rows[-1][-1] += data


def test_every_module_of_views_is_in_the_list() -> None:
    modules = {f"{views.__name__}.{found.name}" for found in pkgutil.iter_modules(views.__path__)}
    listed: list[Any] = list(VIEWS.values())

    assert modules == {view.__name__ for view in listed}


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [1, 2, 16, 64])
@pytest.mark.parametrize("name", VIEWS)
def test_every_view_of_any_number_of_ranks_is_a_picture(name: str, ranks: int) -> None:
    slow = 1 if ranks > 1 else None

    image = png(name, seen(ranks, slow=slow))

    assert image.shape[1] == 960
    assert (image[..., :3] < 200).any(axis=2).mean() > 0.005


@pytest.mark.parametrize("theme", ["dark", "auto"])
@pytest.mark.parametrize("name", VIEWS)
def test_every_view_takes_its_background_from_the_theme(name: str, theme: str) -> None:
    corner = png(name, seen(), theme=theme)[-1, -1]

    assert corner[3] == (255 if theme == "dark" else 0)
    assert theme == "auto" or corner[:3].max() < 0x22


@pytest.mark.parametrize("name", VIEWS)
def test_every_view_says_something_before_anything_is_known(name: str) -> None:
    telemetry = Telemetry()
    telemetry.receive(Batch(0, (Record(0, 0, "log", 0, 0, {"reward": 1.0}),)))
    view = look(telemetry, cell_info(2))

    assert png(name, view).shape[1] == 960
    assert VIEWS[name].sentence(view).endswith(".")
    assert tables.to_text(VIEWS[name].table(view))


def test_a_caption_counts_a_rank_that_died_before_it_told_anything() -> None:
    telemetry = Telemetry()
    for rank in (0, 2):
        telemetry.receive(steps_of(rank, 3, 4))
    scene = look(telemetry, cell_info(3))

    assert text.caption(scene, "failed", "Loss") == "Loss on 3 ranks, failed after 4 steps."
    assert text.caption(scene, "finished", "Loss") == "Loss on 2 ranks over 4 steps."


@pytest.mark.parametrize("name", VIEWS)
def test_every_view_bears_losses_and_times_that_are_no_numbers(name: str) -> None:
    telemetry = training(2, 5)
    odd = {"loss": math.nan, "step_s": math.inf, "rss_bytes": math.nan}
    telemetry.receive(Batch(1, (Record(1, 5, "step", 6, 0, odd),)))
    view = look(telemetry, cell_info(2), analysis_of(2, 5))

    assert png(name, view).shape[1] == 960
    assert VIEWS[name].table(view).caption


@pytest.mark.parametrize("name", [name for name in VIEWS if name != "verdicts"])
def test_a_table_in_html_has_the_cells_of_the_text_and_marked_headers(name: str) -> None:
    table = VIEWS[name].table(seen())

    html = Cells(tables.to_html(table))

    assert html.rows == [list(table.head), *(list(row) for row in table.rows)]
    assert html.captions == 1
    assert html.scopes == ["col"] * len(table.head) + ["row"] * len(table.rows)
    lines = tables.to_text(table).splitlines()
    assert lines[0] == table.caption
    assert all(
        cell in line for row, line in zip(table.rows, lines[2:], strict=True) for cell in row
    )


def test_columns_of_numbers_end_on_one_line() -> None:
    table = tables.ViewTable("Speed", ("rank", "name", "ms"), (("0", "a", "9.5"), ("1", "bb", "–")))

    assert tables.to_text(table) == "Speed\nrank  name   ms\n   0  a     9.5\n   1  bb      –"


def test_the_table_of_collectives_tells_who_came_last_and_how_fast_it_moved() -> None:
    table = VIEWS["collectives"].table(seen(slow=2))

    row = dict(zip(table.head, table.rows[0], strict=True))

    assert row["kind"] == "all_reduce"
    assert row["bytes"] == "25 MB float32"
    assert row["came last"] == "rank 2, 84 %"
    assert (row["algbw"], row["busbw"]) == ("4.10 GB/s", "6.20 GB/s")


def test_groups_of_one_title_are_told_apart_by_their_ranks() -> None:
    row = analysis_of().table[0]
    titled = [("group dp", (0, 2)), ("group dp", (1, 3)), ("group tp", (0, 1)), ("", (0, 1, 2, 3))]
    rows = [replace(row, title=title, ranks=ranks) for title, ranks in titled]

    assert group_names(rows) == [
        "group dp, ranks 0, 2",
        "group dp, ranks 1, 3",
        "group tp",
        "ranks 0-3",
    ]


def test_the_table_of_steps_has_parts_that_sum_to_the_step_and_names_who_is_waited_for() -> None:
    table = VIEWS["step"].table(seen(slow=2))

    for cells in table.rows:
        row = dict(zip(table.head, cells, strict=True))
        parts = [float(row[part]) for part in table.head[2:-1]]
        assert sum(parts) == pytest.approx(float(row["step"]), abs=0.05)
        assert row["waits for"].startswith("rank 2, ") or row["rank"] == "2"


def test_a_step_that_nothing_has_explained_has_five_parts_that_sum_to_it() -> None:
    stack = look(training(2, 20), cell_info(2)).stack

    assert stack is not None
    assert list(stack.parts) == ["compute", "communication", "data", "optimizer", "other"]
    assert stack.waits_for == {}
    assert list(stack.whole_ms) == [
        pytest.approx(row.step_ms) for row in look(training(2, 20), cell_info(2)).rows
    ]


def untimed(ranks: int = 2, steps: int = 60, *, is_explained: bool) -> Scene:
    """Return a training whose communication was not measured, as the tap at "counts" tells it."""
    telemetry = Telemetry()
    for rank in range(ranks):
        values = {"step_s": 0.02, "compute_s": 0.018, "data_s": 0.001, "optimizer_s": 0.001}
        rows = [Record(rank, i, "step", i + 1, i, {"loss": 1.0, **values}) for i in range(steps)]
        telemetry.receive(Batch(rank, tuple(rows)))
    parts = {"compute": 18.0, "data": 1.0, "optimizer": 1.0, "other": 0.0}
    known = tuple(RankStep(rank, 20.0, parts) for rank in range(ranks)) if is_explained else ()
    return look(telemetry, cell_info(ranks), Analysis(ranks=known))


@pytest.mark.parametrize("is_explained", [True, False])
def test_communication_that_was_not_measured_is_said_to_be_so_in_every_view(
    is_explained: bool,
) -> None:
    view = untimed(is_explained=is_explained)

    assert view.stack is not None
    assert list(view.stack.parts) == ["compute and communication", "data", "optimizer", "other"]
    assert "communication not measured" in VIEWS["overview"].sentence(view)
    assert "90 % compute and communication" in VIEWS["step"].sentence(view)
    assert "Communication was not timed" in VIEWS["step"].sentence(view)
    assert sentences.verdicts(view) == [sentences.NOT_TIMED]
    assert "not timed" in VIEWS["collectives"].sentence(view)
    overview = VIEWS["overview"].table(view)
    assert dict(zip(overview.head, overview.rows[0], strict=True))["comm %"] == "not measured"
    assert "waiting" not in VIEWS["step"].table(view).head
    for name in VIEWS:
        assert png(name, view).shape[1] == 960
        assert "0 % of a step in communication" not in VIEWS[name].sentence(view)


@pytest.mark.parametrize("known", [analysis_of(2, 60), None])
def test_the_overview_stacks_the_parts_of_the_step_view_up_to_the_whole_step(
    known: Analysis | None,
) -> None:
    view = look(training(2, 60), cell_info(2), known)
    page = compose(view, palette.theme_named("light"))

    (axes,) = [axes for axes in page.figure.axes if axes.get_title("left") == "step time, ms"]
    tops = [np.asarray(patch.get_path().vertices)[:, 1].max() for patch in axes.patches]
    assert view.stack is not None
    assert max(tops) == pytest.approx(float(view.stack.whole_ms.max()))
    (legend,) = [
        found for found in page.figure.legends if found.get_texts()[0].get_text() == "compute"
    ]
    labels = [palette.part_label(name) for name in view.stack.seen]
    assert [words.get_text() for words in legend.get_texts()] == labels


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 64])
def test_the_two_legends_of_the_overview_never_lie_on_each_other(ranks: int) -> None:
    view = seen(ranks)
    page = compose(view, palette.theme_named("light"))
    page.canvas.draw()

    one, other = (legend.get_window_extent() for legend in page.figure.legends)

    assert not one.overlaps(other)
    assert one.x0 >= 0
    assert other.x1 <= 960


def test_the_share_of_communication_is_one_figure_in_picture_table_and_sentence() -> None:
    view = seen(2)

    said = f"{view.comm_pct:.0f} % of a step"

    assert lines._note(view.panel("comm_s"), view) == said
    assert f"{said} in communication" in VIEWS["overview"].sentence(view)
    table = VIEWS["overview"].table(view)
    shares = [dict(zip(table.head, row, strict=True))["comm %"] for row in table.rows]
    assert sum(map(float, shares)) / 2 == pytest.approx(view.comm_pct, abs=0.6)


def test_two_ranks_that_both_stand_out_have_no_others_to_wait() -> None:
    verdicts = tuple(Straggler(rank, "data", 0.5, "slow", 1) for rank in (0, 1))
    view = look(training(2, 60), cell_info(2), Analysis(verdicts=verdicts))

    assert VIEWS["overview"].sentence(view).endswith("ranks 0-1 make each other wait.")
    assert all(
        row[-1] == "◀ they wait for each other" for row in VIEWS["overview"].table(view).rows
    )


def test_a_picture_says_where_the_loss_ended_as_its_sentence_does() -> None:
    view = replace(look(training(2, 1500), cell_info(2)), outcome="finished")
    ends = [line.y[-1] for line in view.panel("loss").lines]

    said = lines._note(view.panel("loss"), view)

    assert said == f"{figure(np.mean(ends))} in the last step"
    assert said.removesuffix(" in the last step") in VIEWS["overview"].sentence(view)


def test_ranks_tell_their_rates_and_their_memory() -> None:
    table = VIEWS["ranks"].table(look(training(2, 20), cell_info(2)))

    row = dict(zip(table.head, table.rows[1], strict=True))
    pace = float(row["steps/s"])

    assert float(row["samples/s"].replace(",", "")) == pytest.approx(32 * pace, rel=0.01)
    assert row["memory"] == "611 MB"
    assert row["tokens/s"] == "–"
    assert row["state"] == "trains"
    assert "device memory" not in row


def test_a_rank_on_a_device_tells_that_memory_too() -> None:
    telemetry = training(1, 3)
    values = {"cuda_bytes": 2e9, "cuda_peak_bytes": 3.5e9, "cuda_reserved_bytes": 4e9}
    telemetry.receive(Batch(0, (Record(0, 3, "step", 4, 0, values),)))

    table = VIEWS["ranks"].table(look(telemetry, cell_info(1, "cuda:0")))

    assert table.head[-3:] == ("device memory", "its peak", "reserved")
    assert table.rows[0][-3:] == ("2.0 GB", "3.5 GB", "4.0 GB")


def test_a_rank_that_says_nothing_and_one_that_falls_behind_are_told_apart() -> None:
    telemetry = Telemetry()
    telemetry.receive(steps_of(0, 3, 120))
    telemetry.receive(steps_of(1, 3, 20))

    rows = VIEWS["ranks"].table(look(telemetry, cell_info(3))).rows

    assert [row[2] for row in rows] == ["trains", "behind", "silent"]


def test_a_table_breaks_its_words_and_not_its_numbers() -> None:
    table = tables.ViewTable("Ranks", ("rank", "device"), (("0", "a long device <name>"),))

    html = tables.to_html(table)

    assert re.search(r"white-space: nowrap[^>]*>0<", html)
    assert re.search(r"white-space: normal[^>]*>a long device &lt;name&gt;<", html)


def test_verdicts_are_told_as_they_are() -> None:
    view = seen(slow=2)

    (said,) = sentences.verdicts(view)

    assert said == "rank 2 is 48 % slower: its data loading (5.6 ms against 0.8 ms a step)."
    assert VIEWS["verdicts"].table(view).rows[0][:3] == ("2", "48 %", "data loading")


@pytest.mark.parametrize(
    ("ranks", "steps", "analysis", "said"),
    [
        (4, 60, analysis_of(4), "No rank stands out over the last 50 steps."),
        (
            4,
            12,
            analysis_of(4),
            "Too early to tell: 50 steps are needed, and rank 0 made 12 steps.",
        ),
        (1, 60, Analysis(), "There is only one rank, so there is nothing to compare."),
        (4, 60, Analysis(), sentences.NOT_EXPLAINED),
    ],
)
def test_where_there_is_no_verdict_it_says_why(
    ranks: int, steps: int, analysis: Analysis, said: str
) -> None:
    view = look(training(ranks, steps), cell_info(ranks), analysis)

    assert sentences.verdicts(view) == [said]


def test_the_sentence_of_a_step_names_its_parts_and_the_longest_wait() -> None:
    view = seen(slow=2)
    said = VIEWS["step"].sentence(view)

    assert view.stack is not None
    assert said.startswith(f"A step takes {view.stack.whole_ms.mean():.1f} ms: ")
    assert "% waiting" in said
    assert said.endswith(" ms per step for rank 2.")


def test_the_sentence_of_collectives_tells_what_is_left_out_and_how_true_it_is() -> None:
    known = analysis_of()
    left = Analysis(known.ranks, known.table, known.line, (), 0.02, 60, 1200)

    said = VIEWS["collectives"].sentence(look(training(4, 60), cell_info(4), left))

    assert "at most 0.020 ms" in said
    assert said.endswith("are timed: 1,200 collectives were counted but not timed.")


@pytest.mark.parametrize("name", VIEWS)
def test_captions_hold_no_number_but_ranks_and_steps(name: str) -> None:
    one = look(training(2, 30), cell_info(2), analysis_of(2, slow=1))
    other = look(training(2, 30), cell_info(2))

    assert text.caption(one, "finished", VIEWS[name].CAPTION) == text.caption(
        other, "finished", VIEWS[name].CAPTION
    )
    assert text.caption(one, "finished", VIEWS[name].CAPTION).endswith("on 2 ranks over 30 steps.")


def test_strips_of_many_ranks_name_the_extremes() -> None:
    from nbdist.client.board.drawn.plots.strips import Strip, extremes

    values = np.array([3.0, math.nan, 9.0, 1.0])

    assert extremes((4, 5, 6, 7), Strip("data", "#000000", values, figure)) == (
        "median 3.00\nmost 9.00 on 6, least 1.00 on 7"
    )
    even = Strip("data", "#000000", np.array([2.0, 2.0]), figure)
    assert extremes((0, 1), even) == "2.00 on all"


def words(page: Page) -> list[Text]:
    """Return all that is written on a page, but for the numbers of axes."""
    page.canvas.draw()
    ticks = {id(tick) for axes in page.figure.axes for tick in ticks_of(axes)}
    return [t for t in page.figure.findobj(Text) if t.get_text() and id(t) not in ticks]


def ticks_of(axes: Axes) -> list[Text]:
    return [text for axis in (axes.xaxis, axes.yaxis) for text in axis.findobj(Text)]


LONG = (
    "rank 1 is 48 % slower: its backward takes 5.6 ms per step, 0.8 ms on the others, and 4.1 "
    "ms of it nothing ran (it slept, or waited for something that is no communication)."
)


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [1, 4, 64])
@pytest.mark.parametrize("name", VIEWS)
def test_no_word_leaves_the_picture(name: str, ranks: int) -> None:
    view = seen(ranks, 300, slow=1 if ranks > 1 else None)
    table = tuple(
        replace(row, kind="reduce_scatter_tensor_coalesced", title=12 * "mesh ", line="cell 1,234")
        for row in view.analysis.table
    )
    verdicts = tuple(replace(v, sentence=LONG) for v in view.analysis.verdicts)
    view = replace(view, analysis=replace(view.analysis, table=table, verdicts=verdicts))
    page = compose(view, palette.theme_named("light"), name=name)

    for word in words(page):
        box = word.get_window_extent()
        assert -1 <= box.x0 <= box.x1 <= page.width + 1, word.get_text()
        assert -1 <= box.y0 <= box.y1 <= page.height + 1, word.get_text()


def test_a_loss_that_ends_in_no_number_is_said_over_its_plot() -> None:
    telemetry = training(2, 60)
    telemetry.receive(Batch(1, (Record(1, 60, "step", 61, 0, {"loss": math.nan}),)))
    page = compose(look(telemetry, cell_info(2)), palette.theme_named("light"), name="loss")

    assert "not finite on rank 1" in [word.get_text() for word in words(page)]


def test_only_what_leaves_a_plot_is_marked_at_its_edge() -> None:
    scene = look(training(8, 300), cell_info(8))
    page = compose(scene, palette.theme_named("light"))
    (axes,) = [axes for axes in page.figure.axes if axes.get_title("left") == "communication, ms"]
    _, edge = axes.get_ylim()

    marked = [
        x for line in axes.lines if line.get_marker() == "^" for x in np.asarray(line.get_xdata())
    ]

    curves = scene.panel("comm_s").lines
    assert sorted(marked) == sorted(x for line in curves for x in line.x[line.y > edge])
    assert len(marked) > 8, "more than the first step of each rank"


@pytest.mark.parametrize("ranks", [4, 64])
def test_the_words_beside_bars_and_strips_are_seen(ranks: int) -> None:
    page = compose(seen(ranks), palette.theme_named("light"), name="step")
    (axes,) = page.figure.axes

    beside = page.pixels()[:, int(axes.bbox.x1) + 5 :, :3]

    assert (beside < 128).all(axis=2).mean() > 0.01


def test_one_rank_alone_is_told_why_it_has_no_collectives() -> None:
    said = VIEWS["collectives"].sentence(look(training(1, 20), cell_info(1)))

    assert said == "There is only one rank, so there is no communication."


def test_of_many_ranks_that_are_alike_none_is_the_highest() -> None:
    steps = np.arange(1.0, 6.0)
    alike = tuple(Curve(rank, steps, np.ones(5)) for rank in range(64))
    assert lines._extremes(alike) == []
    above = Curve(7, steps, np.full(5, 2.0))
    assert [line.rank for line in lines._extremes((*alike[:7], above, *alike[8:]))] == [7, 0]


@pytest.mark.matrix
@pytest.mark.parametrize("width", [WIDE, NARROW])
@pytest.mark.parametrize("ranks", [2, 8, 16, 64])
@pytest.mark.parametrize("name", VIEWS)
def test_words_and_legends_are_whole_and_do_not_lie_over_each_other(
    name: str, ranks: int, width: int
) -> None:
    view = replace(seen(ranks, slow=1), outcome="finished")
    page = compose(view, palette.theme_named("light"), width, name=name)
    page.canvas.draw()
    renderer = page.canvas.get_renderer()

    boxes = [found.get_window_extent(renderer) for found in page.figure.legends]
    boxes += [words.get_window_extent(renderer) for words in page.figure.texts]
    ticks = [
        sorted(
            (t.get_window_extent(renderer) for t in axes.get_xticklabels() if t.get_text()),
            key=lambda b: b.x0,
        )
        for axes in page.figure.axes
    ]
    for row in ticks:
        assert all(one.x1 < other.x0 for one, other in pairwise(row)), "numbers below an axis"
    titles = [axes._left_title.get_window_extent(renderer) for axes in page.figure.axes]  # type: ignore[attr-defined]
    for box in [*boxes, *(title for title in titles if title.width > 1)]:
        assert box.x0 >= 0
        assert box.x1 <= width
        assert 0 <= box.y0 < box.y1 <= page.height
    for one, other in combinations([*boxes, *(t for t in titles if t.width > 1)], 2):
        across = min(one.x1, other.x1) - max(one.x0, other.x0)
        along = min(one.y1, other.y1) - max(one.y0, other.y0)
        assert min(across, along) < 2.0, "pixels, in which nothing is written"
