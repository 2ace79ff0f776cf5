"""The buttons of a board whose cell has ended, with the outputs and events they are given."""

import io
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
from PIL import Image

from nbdist.client.board import VIEWS, palette
from nbdist.client.board import controls as controls_module
from nbdist.client.board.controls import Controls, show_past
from nbdist.client.board.look import look
from nbdist.client.board.past import Past
from nbdist.client.output.slots import Display, Slot, Slots
from tests.unit.client.board.board_data import analysis_of, cell_info, training


class Place(Slot):
    """One output of a cell, which remembers all that was shown in it."""

    def __init__(self, shown: Any) -> None:
        self.shown = [shown]

    def update(self, display: Display) -> None:
        self.shown.append(display)


class Places(Slots):
    def __init__(self) -> None:
        self.all: list[Place] = []

    def open(self, shown: Any, beside: Mapping[str, Any] | None = None) -> Place:
        self.all.append(Place(shown))
        return self.all[-1]


class Events:
    def __init__(self) -> None:
        self.functions: list[Callable[..., None]] = []

    def register(self, event: str, function: Callable[..., None]) -> None:
        assert event == "pre_run_cell"
        self.functions.append(function)

    def unregister(self, event: str, function: Callable[..., None]) -> None:
        self.functions.remove(function)

    def next_cell(self) -> None:
        for function in list(self.functions):
            function(object())


@pytest.fixture
def past() -> Past:
    view = look(training(2, 60), cell_info(2), analysis_of(2, slow=1))
    return Past(replace(view, outcome="finished"), palette.theme_named("auto"))


@pytest.fixture
def shown(past: Past) -> Iterator[tuple[Places, Events, Controls]]:
    places, events = Places(), Events()
    controls = Controls(past, "overview", places, events)
    yield places, events, controls
    controls.retire()


def test_picture_and_table_are_plain_outputs_beside_the_buttons(
    shown: tuple[Places, Events, Controls],
) -> None:
    places, _, controls = shown
    buttons = controls.box.children[0]

    assert buttons.value == "overview"
    assert len(places.all) == 3
    assert "image/png" in places.all[1].shown[0].data
    assert "<table" in places.all[2].shown[0].data["text/html"]
    assert 'role="status"' in places.all[2].shown[0].data["text/html"]


def test_a_button_changes_picture_and_table(shown: tuple[Places, Events, Controls]) -> None:
    places, _, controls = shown
    buttons = controls.box.children[0]

    buttons.value = "collectives"

    _, picture, words = places.all
    assert len(picture.shown) == len(words.shown) == 2
    assert picture.shown[0] != picture.shown[1]
    assert "all_reduce" in words.shown[1].data["text/html"]
    assert "\n3 collectives per step" in words.shown[1].data["text/plain"]


def test_a_button_shows_that_the_picture_is_being_drawn_until_it_is_there(
    shown: tuple[Places, Events, Controls],
) -> None:
    places, _, controls = shown
    buttons, _, at_work = controls.box.children
    seen: list[tuple[str, int]] = []
    at_work.observe(lambda _: seen.append((at_work.value, len(places.all[1].shown))), "value")

    buttons.value = "step"

    (drawing, before), (nothing, after) = seen
    assert "Drawing step" in drawing
    assert 'role="status"' in drawing
    assert (nothing, before, after) == ("", 1, 2)


@pytest.mark.parametrize("view", ["overview", "ranks"])
def test_a_static_kernel_shows_a_board_as_text_whichever_view(
    view: str, past: Past, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NBDIST_STATIC", "1")
    monkeypatch.setattr(controls_module, "kernel_shell", lambda: object())

    show_past(past, view)

    assert capsys.readouterr().out == f"{past.plain(view)}\n"


def test_ranks_of_a_cell_that_has_ended_are_told_as_they_were_at_its_end(past: Past) -> None:
    said = past.plain("ranks")

    assert "Ranks at the end of the cell" in said
    assert said.count("finished") == 2
    assert "trains" not in said


def test_every_button_says_what_it_shows(shown: tuple[Places, Events, Controls]) -> None:
    buttons = shown[2].box.children[0]

    assert [name for _, name in buttons.options] == list(VIEWS)
    assert all(view.HELP in buttons.tooltip for view in VIEWS.values())


def test_smoothing_is_there_for_the_loss_and_changes_its_picture(
    shown: tuple[Places, Events, Controls],
) -> None:
    places, _, controls = shown
    buttons, slider, _ = controls.box.children
    assert slider.layout.display == "none"

    buttons.value = "loss"
    slider.value = 25

    assert slider.layout.display == ""
    pictures = places.all[1].shown
    assert len(pictures) == 3
    assert pictures[1] != pictures[2]


def test_the_next_cell_puts_the_caption_in_the_place_of_the_buttons(
    shown: tuple[Places, Events, Controls],
) -> None:
    places, events, controls = shown
    buttons = controls.box.children[0]
    buttons.value = "step"

    events.next_cell()
    events.next_cell()

    bar = places.all[0].shown
    assert len(bar) == 2
    assert bar[1].data["text/plain"] == "Step-time breakdown on 2 ranks over 60 steps."
    assert events.functions == []
    assert buttons.comm is None, "the widget is closed"


def test_buttons_that_nobody_uses_give_way_to_the_caption(past: Past) -> None:
    places, events = Places(), Events()
    controls = Controls(past, "step", places, events, idle_s=0.05)

    deadline = time.monotonic() + 30
    while not controls.is_retired:
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)

    assert places.all[0].shown[1].data["text/plain"].startswith("Step-time breakdown")
    assert events.functions == []


def test_a_front_end_without_widgets_shows_how_to_get_the_buttons(
    shown: tuple[Places, Events, Controls],
) -> None:
    bar = shown[0].all[0].shown[0].data

    assert "application/vnd.jupyter.widget-view+json" in bar
    assert "Run %dist board again" in bar["text/html"]
    assert bar["text/plain"] == "Run %dist board again to get its buttons."


def test_the_table_stands_once_in_the_words_and_not_in_the_picture_above_them(past: Past) -> None:
    def height(png: bytes) -> int:
        return Image.open(io.BytesIO(png)).height

    alone, beside = past.png("collectives"), past.png("collectives", beside_words=True)

    assert height(beside) < height(alone) - 50
    assert past.png("step") == past.png("step", beside_words=True)


def test_without_a_kernel_a_view_is_text(past: Past, capsys: pytest.CaptureFixture[str]) -> None:
    show_past(past, "collectives")

    said = capsys.readouterr().out
    assert "no.  kind" in said
    assert said.count("all_reduce") >= 3


def test_verdicts_as_text_are_their_sentences(past: Past) -> None:
    assert past.plain("verdicts").startswith("rank 1 is 48 % slower")
