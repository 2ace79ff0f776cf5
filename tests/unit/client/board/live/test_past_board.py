"""A board of a run that is over, shown live, and what stays of it."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from nbdist.client.board import VIEWS
from nbdist.client.board.live.past_board import PastBoard
from nbdist.client.board.live.widget import VIEW_TYPE, BoardWidget
from nbdist.client.board.palette import theme_named
from nbdist.client.board.past import Past
from nbdist.client.board.scene.look import look
from nbdist.client.output.slots import Display, Slot, Slots
from tests.unit.client.board.board_data import analysis_of, cell_info, training


class Events:
    """IPython's events, of one name."""

    def __init__(self) -> None:
        self.called: list[Callable[..., None]] = []

    def register(self, event: str, function: Callable[..., None]) -> None:
        assert event == "pre_run_cell"
        self.called.append(function)

    def unregister(self, event: str, function: Callable[..., None]) -> None:
        self.called.remove(function)


class Shelf(Slots):
    """Slots that remember what each shows."""

    def __init__(self) -> None:
        super().__init__(live=False)
        self.shown: list[Display] = []
        self.places: list[Slot] = []

    def open(
        self, shown: Any, beside: Mapping[str, Any] | None = None, *, stays: bool = False
    ) -> Slot:
        self.places.append(super().open(shown, beside, stays=stays))
        self.shown.append(shown)
        return self.places[-1]

    def _update(self, slot: Slot, display: Display) -> None:
        self.shown[self.places.index(slot)] = display


def past(run: str = "", *, has_records: bool = False) -> Past:
    telemetry = training(2, 40)
    scene = look(telemetry, cell_info(2), analysis_of(2, 40, slow=1))
    object.__setattr__(scene, "outcome", "finished")
    records = telemetry if has_records else None
    return Past(scene, theme_named("auto"), run=run, records=records)


def test_it_is_a_widget_with_its_picture_below_for_who_has_none() -> None:
    shelf, events = Shelf(), Events()
    board = PastBoard(past("fast"), "loss", shelf, events)

    widget, picture, words = shelf.shown
    assert VIEW_TYPE in widget.data
    assert VIEW_TYPE not in {**picture.data, **words.data}
    assert "mean of last 50" in words.data["text/plain"], "where a front end shows text alone"
    assert "image/png" in picture.data
    assert "<img" in picture.data["text/html"]
    board.retire()


def test_a_page_gets_all_views_at_once() -> None:
    shelf, events = Shelf(), Events()
    board = PastBoard(past("fast"), "loss", shelf, events)

    state = board._widget.get_state()

    assert state["frame"]["view"] == "loss"
    assert state["words"]["outcome"] == "finished"
    assert state["words"]["progress"] == "Run fast: Loss on 2 ranks over 40 steps."
    assert set(state["words"]["sentences"]) == set(VIEWS)
    assert state["words"]["captions"]["step"].startswith("Run fast: Step-time breakdown")
    assert {name for name, *_ in state["history"]["headers"]} >= {"loss", "step", "part.compute"}
    board.retire()


def test_a_zoom_is_answered_where_the_records_are_and_refused_in_words_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(BoardWidget, "send", lambda _, content, buffers=None: sent.append(content))
    asked = {"kind": "range", "low": 3.5, "high": 8, "page": "a page"}
    newest = PastBoard(past(has_records=True), "loss", Shelf(), Events())
    other = PastBoard(past("fast"), "loss", Shelf(), Events())

    for board in (newest, other):
        board._hear(asked)

    (answer,) = sent
    counts = {name: count for name, _, _, _, _, count in answer.pop("headers")}
    assert answer == {"kind": "range", "low": 3.5, "high": 8, "page": "a page", "lost": ""}
    assert counts == {"loss": 5, "step": 5, "comm": 5}
    assert newest._widget.frame["lost"] is None
    assert other._widget.frame["lost"] == "the board of a run keeps no more"
    newest.retire()
    other.retire()


def test_the_next_cell_leaves_the_picture_and_words_of_the_view_that_was_chosen_last() -> None:
    shelf, events = Shelf(), Events()
    board = PastBoard(past(), "loss", shelf, events)
    board._hear({"kind": "view", "name": "step"})
    board._hear({"kind": "view", "name": "no such view"})

    (next_cell,) = events.called
    next_cell()

    assert board.is_retired
    assert events.called == []
    said, picture, words = shelf.shown
    assert said.data["text/plain"] == "Step-time breakdown on 2 ranks over 40 steps."
    assert picture.data["text/plain"] == "Step-time breakdown on 2 ranks over 40 steps."
    assert "A step takes" in words.data["text/plain"]
    assert not any(VIEW_TYPE in display.data for display in shelf.shown)
    board.retire()  # once more: nothing


def test_one_that_nobody_leaves_gives_way_by_itself() -> None:
    shelf, events = Shelf(), Events()
    board = PastBoard(past(), "overview", shelf, events, idle_s=0.01)
    board._timer.join(30)
    assert board.is_retired
    assert not any(VIEW_TYPE in display.data for display in shelf.shown)
