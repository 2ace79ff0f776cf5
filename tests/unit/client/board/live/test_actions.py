"""What pages ask of a running cell is done, and what fails is told there."""

from typing import Any

import pytest

from nbdist.client.board.live.actions import CellActions
from nbdist.shared.errors import ClusterError


class Halts:
    """Notes what is asked of all ranks at one step."""

    def __init__(self) -> None:
        self.asked: list[tuple[object, ...]] = []
        self.paused_at: int | None = None

    def pause(self, timeout_s: float) -> str:
        self.asked.append(("pause",))
        return "Paused after step 7."

    def resume(self) -> str:
        self.asked.append(("resume",))
        return "Going on."

    def peek(self, expression: str, timeout_s: float) -> str:
        self.asked.append(("peek", expression))
        return "ranks 0-1: 3.0"

    def change_as_typed(self, word: str, timeout_s: float) -> str:
        self.asked.append(("change", word))
        return "lr 0.1 -> 0.01"


def actions(**more: Any) -> CellActions:
    def interrupt(rank: int | None) -> str:
        return "all" if rank is None else f"rank {rank}"

    given = {"stacks": lambda: "where", "cost": lambda: "1 %", "interrupt": interrupt}
    return CellActions(**{**given, "halts": Halts(), **more})


def test_stacks_and_cost_are_answered_with_the_time() -> None:
    answer = actions().answer({"kind": "ask", "what": "stacks", "rank": -1})
    assert answer["kind"] == "answer"
    assert answer["title"].startswith("Stacks at ")
    assert answer["text"] == "where"
    assert actions().answer({"kind": "ask", "what": "cost"})["text"] == "1 %"


@pytest.mark.parametrize(("chosen", "said"), [(-1, "all"), (3, "rank 3")])
def test_an_interrupt_reaches_the_ranks_that_were_chosen(chosen: int, said: str) -> None:
    assert actions().answer({"what": "interrupt", "rank": chosen}) == {
        "kind": "remark",
        "text": said,
    }


def test_what_fails_is_told_in_the_page(caplog: pytest.LogCaptureFixture) -> None:
    def refused() -> str:
        raise ClusterError("The ranks are gone.")

    def broken() -> str:
        raise KeyError("x")

    assert (
        actions(stacks=refused).answer({"what": "stacks"})["text"].startswith("The ranks are gone.")
    )
    assert caplog.records == []
    assert "KeyError: 'x'" in actions(stacks=broken).answer({"what": "stacks"})["text"]
    assert len(caplog.records) == 1


def test_a_button_of_another_version_is_told_so() -> None:
    assert "does not know" in actions().answer({"what": "dance"})["text"]


@pytest.mark.parametrize(
    ("typed", "asked"),
    [
        ("model.weight.norm()", "peek"),
        ("loss == 3", "peek"),
        ("x[0] <= 3", "peek"),
        ("f(a=1)", "peek"),
        ("lr=0.01", "change"),
        (" lr = 0.01", "change"),
    ],
)
def test_what_is_typed_is_looked_at_or_set_as_it_reads(typed: str, asked: str) -> None:
    halts = Halts()
    answer = actions(halts=halts).answer({"what": "peek or change", "text": typed})
    assert halts.asked == [(asked, typed)]
    assert answer["kind"] == ("answer" if asked == "peek" else "remark")


def test_a_pause_and_its_end_are_said_beside_the_buttons() -> None:
    halts = Halts()
    said = [actions(halts=halts).answer({"what": what})["text"] for what in ("pause", "continue")]
    assert said == ["Paused after step 7.", "Going on."]
    assert halts.asked == [("pause",), ("resume",)]
