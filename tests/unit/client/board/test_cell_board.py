import re
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

import nbdist
from nbdist.client.board import VIEWS, figure
from nbdist.client.board.cell_board import Board
from nbdist.client.board.live import live as live_module
from nbdist.client.board.live.widget import BoardWidget
from nbdist.client.cells.cell_context import CellContext
from nbdist.client.metrics.analysis.cell_analysis import CellAnalysis
from nbdist.client.metrics.analysis.clocks import Clocks
from nbdist.client.metrics.analysis.values import Analysis
from nbdist.client.metrics.detail import Detail
from nbdist.client.metrics.telemetry import Telemetry
from nbdist.client.output.slots import Display, Slot, Slots
from nbdist.shared.background import CoreWaits
from nbdist.shared.errors import ClusterError
from tests.unit.client.board.board_data import analysis_of, cell_info, steps_of, training


class Shelf(Slots):
    """Slots that remember what was shown."""

    def __init__(self) -> None:
        super().__init__(live=False)
        self.shown: list[Any] = []
        self.heard: Callable[[], None] = lambda: None  # called at each update

    def open(
        self, shown: Any, beside: Mapping[str, Any] | None = None, *, stays: bool = False
    ) -> Slot:
        self.shown.append(shown)
        return super().open(shown, beside, stays=stays)

    def _update(self, slot: Slot, display: Display) -> None:
        self.shown.append(display)
        self.heard()


def until_it_wants_to_open(board: Board) -> None:
    deadline = time.monotonic() + 30
    while not board.wants_to_open:
        assert time.monotonic() < deadline, "the board never became ready"
        threading.Event().wait(0.01)


class Page:
    """What a board's widget has sent, as a page hears it."""

    def __init__(self) -> None:
        self.heard: list[dict[str, Any]] = []
        self._has_news = threading.Condition()

    def send(self, widget: Any, content: dict[str, Any], buffers: object = None) -> None:
        with self._has_news:
            self.heard.append(content)
            self._has_news.notify_all()

    def until(self, is_it: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait for a message of which this is true; return it."""
        with self._has_news:
            assert self._has_news.wait_for(lambda: any(map(is_it, self.heard)), 30), self.heard[-3:]
            return next(filter(is_it, self.heard))


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Page:
    page = Page()
    monkeypatch.setattr(BoardWidget, "send", lambda *args: page.send(*args))
    return page


def board_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "nbdist-board"]


def test_a_cell_without_records_has_no_board_and_leaves_nothing() -> None:
    slots = Shelf()
    board = Board(cell_info(2), Telemetry(), slots, pictures=True)

    assert not board.wants_to_open
    assert board.finish("finished") == []
    assert slots.shown == []
    assert board_threads() == []


def test_a_cell_that_trains_opens_one_board_that_becomes_a_picture_and_a_caption() -> None:
    slots, telemetry = Shelf(), training(2, 80)
    board = Board(cell_info(2), telemetry, slots, pictures=True)

    until_it_wants_to_open(board)
    board.open()
    assert not board.wants_to_open
    picture, caption = board.finish("finished")

    assert isinstance(slots.shown[0], BoardWidget)
    assert len(slots.shown) == 2, "and its words for the file"
    assert set(picture.data) == {"text/html", "image/png", "text/plain"}
    assert set(caption.data) == {"text/markdown", "text/plain"}
    sentence = "Loss and communication time on 2 ranks over 80 steps."
    assert "<details" in picture.data["text/html"], "its numbers, folded"
    assert re.search(r"<th scope=.row.[^>]*>1</th>", picture.data["text/html"])
    assert picture.data["text/plain"] == caption.data["text/plain"] == sentence
    assert board_threads() == []


def test_where_widgets_do_not_live_words_stand_below_them_renewed_now_and_then(
    monkeypatch: pytest.MonkeyPatch, page: Page
) -> None:
    monkeypatch.setattr(live_module, "KEEP_S", 0.0)
    slots, telemetry = Shelf(), training(2, 30)
    board = Board(cell_info(2), telemetry, slots, pictures=True)
    until_it_wants_to_open(board)
    board.open()
    first = slots.shown[1].data
    assert first["text/plain"].splitlines()[1].startswith("30 [")
    assert "Step 30" in first["text/plain"]
    renewed = threading.Event()
    slots.heard = lambda: renewed.set() if "Step 50" in slots.shown[-1].data["text/plain"] else None

    for rank in range(2):
        telemetry.receive(steps_of(rank, 2, 20, first=31))

    assert renewed.wait(30)
    board.finish("finished")


def test_what_a_page_zooms_to_is_sent_to_it_while_the_cell_runs_and_kept_for_its_board(
    page: Page, tmp_path: Path
) -> None:
    telemetry = Telemetry(detail=Detail(tmp_path))
    for at in range(0, 30_000, 500):
        telemetry.receive(steps_of(0, 1, 500, first=at + 1))
    board = Board(cell_info(1), telemetry, Shelf(), pictures=True)
    until_it_wants_to_open(board)
    board.open()
    assert board._live is not None

    board._live._hear({"kind": "range", "low": 100, "high": 1099, "page": "a"})

    answer = page.until(lambda heard: heard["kind"] == "range")
    counts = {name: count for name, _, _, _, _, count in answer["headers"]}
    assert counts["loss"] == counts["step"] == 1000
    assert (answer["page"], answer["lost"]) == ("a", "")
    board.finish("finished")
    assert board.past is not None
    assert board.past.records is telemetry


def test_between_two_kept_words_lies_a_time_that_a_saved_file_can_bear(
    monkeypatch: pytest.MonkeyPatch, page: Page
) -> None:
    monkeypatch.setattr(live_module, "KEEP_S", 1e6)
    slots, telemetry = Shelf(), training(2, 30)
    board = Board(cell_info(2), telemetry, slots, pictures=True)
    until_it_wants_to_open(board)
    board.open()

    telemetry.receive(steps_of(0, 2, 20, first=31))
    page.until(lambda heard: heard["kind"] == "words")
    board.finish("finished")

    assert len(slots.shown) == 2


def test_while_the_cell_runs_a_subshell_sees_its_board_and_not_the_one_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    showing = CellContext(tmp_path)
    before = Board(cell_info(2), training(2, 20), Shelf(), static=True)
    before.finish("finished")
    showing.remember_board(before.past)
    telemetry = Telemetry()
    running = Board(cell_info(2), telemetry, Shelf(), static=True)
    showing.follow_board(running)
    showing.show_board()
    assert "Step 20" in capsys.readouterr().out, "nothing is recorded yet"

    for rank in range(2):
        telemetry.receive(steps_of(rank, 2, 31))
    showing.show_board()
    assert "Step 31" in capsys.readouterr().out
    past = running.so_far()
    assert past is not None
    assert past.caption("overview").endswith("on 2 ranks, still running after 31 steps.")
    assert past.png("overview").startswith(b"\x89PNG")

    running.finish("interrupted")
    assert running.so_far() is None
    showing.remember_board(running.past)
    showing.show_board()
    assert "Step 31" in capsys.readouterr().out


def test_looking_at_a_view_changes_nothing_for_later_cells(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    showing = CellContext(tmp_path, view="ranks")
    board = Board(cell_info(2), training(2, 60), Shelf(), static=True)
    board.finish("finished")
    showing.remember_board(board.past)

    showing.show_board("step")

    assert "A step takes" in capsys.readouterr().out
    assert showing.view == "ranks"
    showing.show_board()
    assert "2 ranks at step 60" in capsys.readouterr().out


def test_without_a_board_a_view_is_told_how_it_is_set(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="There is no board yet") as missing:
        CellContext(tmp_path).show_board("step")
    assert '%config NBDist.view = "step"' in missing.value.do


def test_live_and_static_leave_the_same_text() -> None:
    telemetry = training(2, 30)
    live = Board(cell_info(2), telemetry, Shelf(), pictures=True)
    until_it_wants_to_open(live)
    live.open()
    static = Board(cell_info(2), telemetry, Shelf(), static=True, pictures=True)

    def texts(board: Board) -> list[tuple[str, Any]]:
        displays = board.finish("interrupted")
        rules = (Path(nbdist.__file__).parent / "nbval_sanitize.cfg").read_text()
        (pixels,) = re.findall(r"^regex: (data:image.*)$", rules, re.MULTILINE)
        data = [item for d in displays for item in d.data.items() if item[0] != "image/png"]
        return [(kind, re.sub(pixels, "", words)) for kind, words in data]

    assert texts(live) == texts(static)


def test_a_static_board_shows_nothing_before_the_end_and_starts_no_thread() -> None:
    slots = Shelf()
    board = Board(cell_info(2), training(2, 5), slots, static=True, pictures=True)

    assert not board.wants_to_open
    assert len(board.finish("finished")) == 2
    assert slots.shown == []


def test_a_terminal_gets_the_sentence_once_and_no_widgets() -> None:
    slots = Shelf()
    board = Board(cell_info(2), training(2, 5), slots, pictures=False)

    assert not board.wants_to_open
    (only,) = board.finish("failed")
    assert only.data["text/plain"].endswith("failed after 5 steps.")


def test_new_records_travel_while_the_cell_runs_and_old_ones_do_not(page: Page) -> None:
    slots, telemetry = Shelf(), training(2, 30)
    board = Board(cell_info(2), telemetry, slots, pictures=True)
    until_it_wants_to_open(board)
    board.open()
    first = page.until(lambda heard: heard["kind"] == "points")
    assert {header[4] for header in first["headers"] if header[0] == "loss"} == {30}

    for rank in range(2):
        telemetry.receive(steps_of(rank, 2, 20, first=31))

    def has_all(heard: dict[str, Any]) -> bool:
        ends = [h[4] for h in heard.get("headers", ()) if h[:2] == ("loss", 1)]
        return heard["kind"] == "points" and 50 in ends

    new = page.until(has_all)
    assert [header[3] for header in new["headers"] if header[:2] == ("loss", 1)] == [30]
    page.until(lambda heard: heard["kind"] == "words" and heard["words"]["step"] == 50)
    board.finish("finished")


def test_while_the_cores_are_full_points_go_on_between_words(
    monkeypatch: pytest.MonkeyPatch, page: Page
) -> None:
    asked: list[float] = []

    def pause_s(usual_s: float, worked_s: float, share: float, waiting: float) -> float:
        asked.append(waiting)
        return 1e6

    monkeypatch.setattr(live_module, "pause_s", pause_s)
    monkeypatch.setattr(CoreWaits, "share", lambda self: 0.9)
    slots, telemetry = Shelf(), training(2, 30)
    board = Board(cell_info(2), telemetry, slots, pictures=True)
    until_it_wants_to_open(board)
    board.open()
    page.until(lambda heard: heard["kind"] == "words")

    telemetry.receive(steps_of(0, 2, 1, first=31))
    page.until(lambda heard: any(header[4] == 31 for header in heard.get("headers", ())))

    board.finish("finished")
    assert asked == [0.9]
    assert [heard["kind"] for heard in page.heard].count("words") == 1


def test_words_that_fail_end_the_board_and_not_the_cell(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, page: Page
) -> None:
    slots, telemetry = Shelf(), training(2, 30)
    board = Board(cell_info(2), telemetry, slots, pictures=True)
    until_it_wants_to_open(board)

    def fail(*_: object) -> None:
        raise ValueError("no words")

    monkeypatch.setattr(live_module.LiveBoard, "_words_now", fail)
    board.open()
    told = page.until(lambda heard: heard["kind"] == "remark")

    assert told["text"].startswith("The board stopped (ValueError: no words)")
    assert len([r for r in caplog.records if r.name == "nbdist.board"]) == 1
    assert len(board.finish("finished")) == 2


def test_a_board_that_cannot_begin_says_so_and_leaves_its_picture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no words")

    monkeypatch.setattr(live_module.LiveBoard, "_words_now", fail)
    slots = Shelf()
    board = Board(cell_info(2), training(2, 30), slots, pictures=True)
    until_it_wants_to_open(board)
    board.open()

    assert "training continues" in slots.shown[0].data["text/plain"]
    _, caption = board.finish("finished")
    assert caption.data["text/plain"] == "Loss and communication time on 2 ranks over 30 steps."


def test_a_picture_that_cannot_be_drawn_leaves_its_caption(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no ink")

    monkeypatch.setattr(figure, "draw", fail)
    board = Board(cell_info(2), training(2, 30), Shelf(), static=True, pictures=True)

    (only,) = board.finish("finished")
    assert only.data["text/plain"] == "Loss and communication time on 2 ranks over 30 steps."


def test_a_thread_that_hangs_is_left_behind_in_bounded_time(
    monkeypatch: pytest.MonkeyPatch, page: Page
) -> None:
    release, hangs = threading.Event(), threading.Event()

    def hang(self: object) -> None:
        hangs.set()
        release.wait(30)

    monkeypatch.setattr(live_module, "STOP_S", 0.05)
    monkeypatch.setattr(live_module.LiveBoard, "_send_words", hang)
    board = Board(cell_info(2), training(2, 30), Shelf(), pictures=True)
    until_it_wants_to_open(board)
    board.open()
    assert hangs.wait(30)

    try:
        (only,) = board.finish("interrupted")
    finally:
        release.set()
    assert only.data["text/plain"].endswith("interrupted after 30 steps.")


def test_a_cell_that_ends_before_the_board_is_ready_leaves_the_same() -> None:
    board = Board(cell_info(2), training(2, 3), Shelf(), pictures=True)
    assert not board.wants_to_open  # begins to load

    assert len(board.finish("finished")) == 2
    assert board_threads() == []


class Known(CellAnalysis):
    """An insight that knows what it was given."""

    def __init__(self, analysis: Analysis) -> None:
        super().__init__(cell_info(2), Clocks(lambda rank: Future()))
        self._analysis = analysis


def test_verdicts_are_told_below_a_live_board_and_never_below_a_static_one() -> None:
    slow, telemetry = Known(analysis_of(2, slow=1)), training(2, 60)
    live = Board(cell_info(2), telemetry, Shelf(), pictures=True, insight=slow)
    static = Board(cell_info(2), telemetry, Shelf(), static=True, pictures=True, insight=slow)

    _, caption, verdict = live.finish("finished")

    assert verdict.data["text/plain"].startswith("rank 1 is 48 % slower")
    assert [d.data["text/plain"] for d in static.finish("finished")][1:] == [
        caption.data["text/plain"]
    ]


def test_a_terminal_reads_the_verdicts_below_the_caption() -> None:
    slow = Known(analysis_of(2, slow=1))
    board = Board(cell_info(2), training(2, 60), Shelf(), pictures=False, insight=slow)

    caption, verdict = board.finish("finished")

    assert caption.data["text/plain"].startswith("Loss and communication time")
    sentence, do = verdict.data["text/plain"].splitlines()
    assert sentence == slow.now().verdicts[0].sentence
    assert do.startswith("Do:  give its DataLoader more workers")


@pytest.mark.parametrize("name", VIEWS)
def test_any_view_is_live_and_leaves_its_picture(name: str) -> None:
    slots, known = Shelf(), Known(analysis_of(2, slow=1))
    board = Board(cell_info(2), training(2, 60), slots, pictures=True, name=name, insight=known)
    until_it_wants_to_open(board)
    board.open()
    state = slots.shown[0].get_state()

    picture, caption, _ = board.finish("finished")

    assert state["frame"]["view"] == name
    assert "48 % slower" in state["words"]["verdicts"], "the verdict is said live"
    assert state["words"]["sentences"][name]
    assert "image/png" in picture.data
    assert board.past is not None
    assert caption.data["text/plain"] == board.past.caption(name)


def test_the_picture_of_a_run_is_the_overview_whichever_view_the_cell_shows() -> None:
    telemetry = training(2, 20)
    board = Board(cell_info(2), telemetry, Shelf(), static=True, pictures=True, name="step")
    other = Board(cell_info(2), telemetry, Shelf(), static=True, pictures=True)

    shown, other_shown = board.finish("finished")[0], other.finish("finished")[0]

    assert shown.data["image/png"] != other_shown.data["image/png"]
    assert board.picture() == other.picture() is not None
