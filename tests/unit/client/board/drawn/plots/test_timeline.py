"""The time line: what a bar means, where it lies, and whose lanes are shown."""

import numpy as np
import pytest
from matplotlib.colors import to_hex

from nbdist.client.board import palette
from nbdist.client.board.drawn.plots.timeline import ALPHAS, hatch_over
from nbdist.client.board.scene.lanes import MOST_LANES, MOST_TRACKS, phases, telling_lanes, tracks
from nbdist.client.board.scene.look import look
from nbdist.client.board.scene.scene import Scene
from nbdist.client.metrics.analysis.values import Span, TimelineLane
from tests.unit.client.board.board_data import analysis_of, cell_info, training


def span(row: int, begin_ms: float, end_ms: float) -> Span:
    return Span(row, begin_ms, begin_ms, end_ms, begin_ms)


def seen(ranks: int, slow: int | None = None) -> Scene:
    return look(training(ranks, 5), cell_info(ranks), analysis_of(ranks, slow=slow))


def test_a_collective_queues_then_waits_for_the_last_rank_then_moves() -> None:
    assert phases(Span(0, 1.0, 2.0, 9.0, 6.0)) == {
        "queueing": (1.0, 2.0),
        "waiting": (2.0, 6.0),
        "transferring": (6.0, 9.0),
    }


def test_the_rank_that_comes_last_does_not_wait() -> None:
    assert phases(Span(0, 6.0, 7.0, 9.0, 6.0)) == {
        "queueing": (6.0, 7.0),
        "transferring": (7.0, 9.0),
    }


def test_a_last_rank_that_nobody_has_seen_leaves_waiting_untold() -> None:
    assert phases(Span(0, 2.0, 2.0, 9.0, None)) == {"transferring": (2.0, 9.0)}


def test_an_arrival_after_the_end_which_a_clock_may_tell_ends_nothing_late() -> None:
    assert phases(Span(0, 2.0, 2.0, 9.0, 9.5)) == {"waiting": (2.0, 9.0)}


def test_collectives_one_after_another_lie_in_one_track() -> None:
    lane = TimelineLane(0, (span(0, 0, 1), span(1, 1, 2), span(0, 3, 4)), ())

    assert tracks([lane]) == [[0, 0, 0]]


def test_a_bucket_lies_at_the_same_height_in_all_lanes() -> None:
    overlapping = TimelineLane(0, (span(0, 0, 5), span(3, 1, 6)), ())
    apart = TimelineLane(1, (span(0, 0, 1), span(3, 2, 3)), ())

    assert tracks([overlapping, apart]) == [[0, 1], [0, 1]]


def test_many_sorts_that_overlap_share_few_tracks_and_none_is_lost() -> None:
    lane = TimelineLane(0, tuple(span(row, row, row + 7.5) for row in range(20)), ())

    (placed,) = tracks([lane])

    assert len(placed) == 20
    assert set(placed) == set(range(MOST_TRACKS))


def test_a_few_ranks_all_have_their_lane() -> None:
    assert [lane.rank for lane in telling_lanes(seen(8))] == list(range(8))


def test_of_many_ranks_the_one_all_wait_for_and_those_who_wait_most_have_lanes() -> None:
    view = seen(64, slow=41)
    most = max(view.analysis.ranks, key=lambda rank: rank.parts["waiting"]).rank

    shown = [lane.rank for lane in telling_lanes(view)]

    assert len(shown) == MOST_LANES
    assert shown == sorted(shown)
    assert {41, most} <= set(shown)


@pytest.mark.parametrize("background", ["#ffffff", "#111111"])
@pytest.mark.parametrize("color", palette.LINE_COLORS)
def test_the_hatch_of_waiting_is_seen_on_its_bar_whatever_the_colour(
    color: str, background: str
) -> None:
    def channels(code: str) -> np.ndarray:
        return np.array([int(code[i : i + 2], 16) for i in (1, 3, 5)])

    share = ALPHAS["waiting"]
    under = share * channels(color) + (1 - share) * channels(background)
    bar = "#" + "".join(f"{round(part):02x}" for part in under)
    hatch = hatch_over([(0.0, 1.0, 0.0, 1.0)], color)

    assert palette.contrast(to_hex(hatch.get_edgecolor()), bar) > 2
