"""The buttons of a live board, without a front end."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from nbdist.client.board import VIEWS, live_controls
from nbdist.client.board.cell_board import Board
from nbdist.client.board.live_controls import ALL, CellActions, LiveControls
from nbdist.shared.errors import ClusterError
from tests.unit.client.board.board_data import cell_info, training
from tests.unit.client.board.test_cell_board import Shelf, until_it_wants_to_open


class Actions:
    """What the buttons do, noted down."""

    def __init__(self) -> None:
        self.interrupted: list[int | None] = []
        self.cell = CellActions(self.stacks, self.cost, self.interrupt)

    def stacks(self) -> str:
        return "rank 0: computing <lambda>"

    def cost(self) -> str:
        raise ClusterError("The cluster is not running.")

    def interrupt(self, rank: int | None) -> str:
        self.interrupted.append(rank)
        return "Interrupting."


@pytest.fixture
def actions() -> Actions:
    return Actions()


@pytest.fixture
def controls(actions: Actions) -> Iterator[LiveControls]:
    controls = LiveControls(actions.cell, (0, 1), "loss", lambda: None)
    yield controls
    controls.close()


def test_the_buttons_are_the_views_and_what_can_be_asked(controls: LiveControls) -> None:
    views, acts = controls.bar.children
    *buttons, ranks, _ = acts.children

    assert [value for _, value in views.options] == list(VIEWS)
    assert views.value == "loss"
    assert [button.description for button in buttons] == ["Stacks", "Cost", "Interrupt"]
    assert all(button.tooltip for button in buttons)
    assert ranks.options == (("all ranks", ALL), ("rank 0", 0), ("rank 1", 1))


def test_stacks_are_shown_as_text_with_their_time_until_they_are_closed(
    controls: LiveControls,
) -> None:
    told, close = controls.panel.children
    assert controls.panel.layout.display == "none"

    controls.bar.children[1].children[0].click()

    assert "Stacks at " in told.value
    assert "computing &lt;lambda&gt;" in told.value
    assert controls.panel.layout.display == ""
    close.click()
    assert controls.panel.layout.display == "none"


def test_an_error_is_shown_in_the_place_of_the_answer(controls: LiveControls) -> None:
    controls.bar.children[1].children[1].click()

    assert "The cluster is not running." in controls.panel.children[0].value


def test_interrupt_means_all_ranks_or_the_chosen_one(
    controls: LiveControls, actions: Actions
) -> None:
    _, _, interrupt, ranks, said = controls.bar.children[1].children

    interrupt.click()
    ranks.value = 1
    interrupt.click()

    assert actions.interrupted == [None, 1]
    assert 'role="status"' in said.value
    assert "Interrupting." in said.value


def test_where_no_subshell_comes_a_line_says_where_to_ask_until_a_click_is_heard(
    actions: Actions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_controls, "SUBSHELL_S", 0.0)
    controls = LiveControls(actions.cell, (0, 1), "loss", lambda: None)
    views, acts = controls.bar.children
    said = acts.children[-1]
    controls._timer.join(30)

    assert "nbdist stacks" in said.value
    views.value = "step"
    assert said.value == ""
    controls.close()


def test_a_closed_widget_hears_nothing_and_nothing_is_left_of_it(actions: Actions) -> None:
    import comm

    known = set(comm.get_comm_manager().comms)
    controls = LiveControls(actions.cell, (0, 1), "loss", lambda: None)
    told = controls.panel.children[0]
    stacks = controls.bar.children[1].children[0]
    controls.close()

    stacks.click()

    assert told.value == ""
    assert set(comm.get_comm_manager().comms) <= known


def test_buttons_that_the_front_end_has_closed_are_closed_once_more_without_an_error(
    actions: Actions,
) -> None:
    import comm

    manager: Any = comm.get_comm_manager()
    known = set(manager.comms)
    controls = LiveControls(actions.cell, (0, 1), "loss", lambda: None)
    stacks = controls.bar.children[1].children[0]

    manager.comm_close(None, "", {"content": {"comm_id": stacks.comm.comm_id}})
    controls.close()

    assert stacks.comm is None
    assert set(manager.comms) <= known


def test_a_click_changes_the_view_that_is_drawn_and_the_picture_that_stays(
    actions: Actions,
) -> None:
    slots = Shelf()
    board = Board(cell_info(2), training(2, 30), slots, pictures=True, actions=actions.cell)
    until_it_wants_to_open(board)
    board.open()
    bar, _, _, image, *_, panel = slots.shown[0].children
    assert panel.layout.display == "none"
    drawn = threading.Event()
    image.observe(lambda _: drawn.set(), "value")

    bar.children[0].value = "step"  # no record comes any more: the click alone has it drawn

    assert drawn.wait(30)
    _, caption = board.finish("finished")
    assert caption.data["text/plain"] == "Step-time breakdown on 2 ranks over 30 steps."
    assert bar.children[0].comm is None
