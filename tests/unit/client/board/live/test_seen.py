"""Where a board is seen, and who shows how its cell ended."""

import pytest

from nbdist.client.board.live.seen import End, Views


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("nbdist.client.board.live.seen.time.monotonic", lambda: now[0])
    return now


def test_outputs_were_cleared_where_all_views_have_gone_and_none_came_for_them(
    clock: list[float],
) -> None:
    views = Views()
    clock[0] += 5
    assert not views.were_cleared(1), "none was there"
    views.hello("a")
    views.goodbye("a")
    views.hello("b")  # as of a cell that is moved
    clock[0] += 5
    assert not views.were_cleared(1)

    views.goodbye("b")
    assert not views.were_cleared(1)
    clock[0] += 1.1

    assert views.were_cleared(1)
    assert not views.were_cleared(1), "it is shown again once"


def test_a_view_that_never_said_goodbye_still_counts(clock: list[float]) -> None:
    views = Views()
    views.hello("of a page that was opened again")
    views.hello("of now")
    views.goodbye("of now")
    clock[0] += 5
    assert not views.were_cleared(1)


def test_one_page_is_asked_to_take_the_end_in_once_there_is_one() -> None:
    end = End()
    assert not end.ask()
    end.left = []
    assert end.ask()
    assert not end.ask()


def test_no_page_is_asked_where_the_end_is_shown() -> None:
    end = End()
    end.left = []
    assert end.shown()
    assert not end.shown(), "the next cell does not show it again"
    assert not end.ask()
    assert end.is_shown_within(0)
