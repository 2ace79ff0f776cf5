"""The verdicts as one block: with weight, with what to do, with the proof."""

from dataclasses import replace
from typing import get_args

import pytest

from nbdist.client.board import VIEWS, palette, verdict_block
from nbdist.client.board.figure import compose
from nbdist.client.board.past import Past
from nbdist.client.board.scene.look import look
from nbdist.client.board.verdict_block import headline, to_html, to_text
from nbdist.client.metrics.analysis.advice import advice_for
from nbdist.client.metrics.analysis.values import Cause, Straggler
from tests.unit.client.board.board_data import analysis_of, cell_info, training

SLOW = Straggler(
    1, "data", 8.0, "Rank 1 takes 9.0 times as long <per> step: its data loading takes 35 ms.", 12
)
LINK = Straggler(2, "link", 0.5, "The link of rank 2 is slow: 8 MB/s.", 20)


@pytest.mark.parametrize("cause", get_args(Cause))
def test_each_cause_has_something_to_do_and_a_view_that_shows_it(cause: Cause) -> None:
    advice = advice_for(replace(SLOW, cause=cause))

    assert advice.do.endswith(".")
    assert advice.view in VIEWS


def test_a_verdict_has_an_accent_its_rank_in_bold_what_to_do_and_the_view() -> None:
    block = to_html([SLOW])

    assert f"border-left: 4px solid {verdict_block.ACCENT}" in block
    assert "<b>Rank 1</b> takes 9.0 times as long &lt;per&gt; step" in block
    assert "more workers, or its data faster storage." in block
    assert "<code>%dist board step</code>" in block


def test_a_terminal_reads_the_same_in_two_lines() -> None:
    sentence, do = to_text([SLOW]).splitlines()

    assert sentence == SLOW.sentence
    assert do == (
        "Do:  give its DataLoader more workers, or its data faster storage. "
        "%dist board step shows it."
    )


def test_the_link_of_a_rank_has_that_rank_in_bold() -> None:
    assert "The link of <b>rank 2</b> is slow" in to_html([LINK])


@pytest.mark.parametrize("background", ["#ffffff", "#111111"])
def test_the_accent_is_seen_on_light_and_on_dark(background: str) -> None:
    assert palette.contrast(verdict_block.ACCENT, background) >= 3


def test_a_forward_in_which_the_rank_sleeps_is_no_matter_of_its_processor() -> None:
    slow = replace(SLOW, cause="forward")

    assert "temperature" in to_text([slow])
    assert "%dist stacks" in to_text([replace(slow, within="idle")])
    assert headline([replace(slow, within="idle")]).endswith(": idle time")
    # The table of the view says the same as the head, and in which part.
    known = analysis_of(2, slow=1)
    idle = replace(known.verdicts[0], cause="forward", within="idle")
    scene = look(training(2, 60), cell_info(2), replace(known, verdicts=(idle,)))
    assert VIEWS["verdicts"].table(scene).rows[0][2] == "idle time in forward"


def test_without_a_verdict_there_is_no_block() -> None:
    assert to_html([]) == to_text([]) == headline([]) == ""


def test_a_pictures_head_has_one_line_that_names_ranks_and_causes() -> None:
    assert headline([SLOW]) == "rank 1 slows the others down: data loading"
    both = "ranks 1-2 slow the others down: data loading, a slow link"
    assert headline([SLOW, LINK]) == both
    scene = replace(look(training(4, 60), cell_info(4), analysis_of(4, slow=1)), outcome="finished")
    theme = palette.theme_named("auto")
    without = compose(replace(scene, analysis=analysis_of(4)), theme)

    assert compose(scene, theme).height == without.height, "a verdict adds no line"


@pytest.mark.parametrize("name", VIEWS)
def test_below_a_board_of_the_past_a_verdict_is_said_once(name: str) -> None:
    scene = look(training(4, 60), cell_info(4), analysis_of(4, slow=1))
    past = Past(replace(scene, outcome="finished"), palette.theme_named("auto"))
    (verdict,) = scene.analysis.verdicts

    words = past.words(name).data

    said = verdict.sentence.removeprefix("rank 1")
    assert words["text/html"].count(said) == words["text/plain"].count(said) == 1
    assert "%dist board step" in words["text/plain"]
