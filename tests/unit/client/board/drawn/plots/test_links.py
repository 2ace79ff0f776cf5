"""Links beside each other, for verdicts that blame one."""

import io
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from nbdist.client.board import palette
from nbdist.client.board.drawn.plots.links import rates_of, slow_links
from nbdist.client.board.figure import compose, draw
from nbdist.client.board.scene.look import look
from nbdist.client.board.scene.scene import Scene
from nbdist.client.metrics.analysis.values import Straggler
from tests.unit.client.board.board_data import analysis_of, cell_info, training


def ring(
    ranks: int, slow: dict[tuple[int, int], float] | None = None
) -> dict[int, dict[int, float]]:
    slow = slow or {}
    links = [(rank, (rank + 1) % ranks) for rank in range(ranks)]
    return {a: {b: slow.get((a, b), 4.1e9 + 1e7 * a)} for a, b in links}


def seen(ranks: int, links: dict[int, dict[int, float]], *causes: tuple[int, str]) -> Scene:
    said = tuple(Straggler(rank, cause, 0.4, f"rank {rank}: {cause}.", 1) for rank, cause in causes)  # type: ignore[arg-type]
    known = replace(analysis_of(ranks), links=links, verdicts=said)
    return look(training(ranks, 60), cell_info(ranks), known)


def test_the_slow_side_of_a_rank_is_its_slow_links_and_no_others() -> None:
    rates = rates_of(seen(4, ring(4, {(2, 3): 0.9e9, (3, 0): 1.0e9})))

    assert slow_links(rates, 3) == {(2, 3), (3, 0)}
    assert slow_links(rates, 2) == {(2, 3)}


def test_of_two_ranks_the_slower_link_is_the_slow_one() -> None:
    rates = {(0, 1): 4.0e9, (1, 0): 1.0e9}

    assert slow_links(rates, 1) == {(1, 0)}


def test_a_rank_without_links_has_no_slow_one() -> None:
    assert slow_links({(0, 1): 1e9}, 2) == set()


def test_own_work_is_what_verdicts_compare_a_step_without_transfer_and_waiting() -> None:
    view = seen(4, {})
    stack = view.stack
    assert stack is not None

    own = view.own_work_ms(stack)

    expected = [steps.step_ms - steps.parts["comm"] for steps in view.recent.values()]
    assert own.tolist() == pytest.approx(expected)


def test_a_slow_link_shows_links_and_slow_work_shows_work() -> None:
    links = ring(4, {(1, 2): 1e8})

    def titles(view: Scene) -> list[str]:
        page = compose(view, palette.theme_named("light"), name="verdicts")
        return [axes.get_title("left").split()[0] for axes in page.figure.axes]

    assert titles(seen(4, links, (2, "data"))) == ["time"]
    assert titles(seen(4, links, (1, "link"))) == ["links,"]
    assert titles(seen(4, links, (2, "data"), (1, "link"))) == ["time", "links,"]
    assert titles(seen(4, {}, (1, "link"))) == ["time"]


@pytest.mark.parametrize("rate", [1.0e9, 2.0e7], ids=["linear", "log"])
@pytest.mark.parametrize("ranks", [2, 4, 64])
def test_the_slow_link_is_the_short_bar_in_the_colour_of_waiting(ranks: int, rate: float) -> None:
    view = seen(ranks, ring(ranks, {(1, 2 % ranks): rate}), (1, "link"))

    png = draw(view, palette.theme_named("light"), name="verdicts")

    image = np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(int)

    def where(part: str) -> np.ndarray:
        color = palette.PARTS[part][0]
        wanted = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
        return np.argwhere(np.abs(image - wanted).sum(axis=2) < 40)

    slow, good = where("waiting"), where("compute")
    assert len(slow)
    assert len(good)
    assert slow[:, 0].min() > good[:, 0].min() + 10, "it reaches less high"
