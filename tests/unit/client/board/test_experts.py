"""What the board shows of experts: rank by rank, and each expert."""

import numpy as np
import pytest
from matplotlib.text import Text

from nbdist.client.board import palette
from nbdist.client.board.figure import compose
from nbdist.client.board.live.points import PointStream
from nbdist.client.board.live.words import words_of
from nbdist.client.board.scene.experts import MOST_MIXTURES
from nbdist.client.board.scene.look import look
from nbdist.client.board.scene.scene import Scene
from nbdist.client.board.scene.scene_file import from_bytes, to_bytes
from nbdist.client.board.views import VIEWS
from nbdist.client.metrics.telemetry import Telemetry
from nbdist.shared.wire import Batch, Record
from tests.unit.client.board.board_data import cell_info, training

LAYERS = "model.layers.{}.mlp.experts"


def trained(mixtures: int = 2) -> Telemetry:
    """Return a training of two ranks with two experts each; rank 1's get three times as many."""
    telemetry = training(2, 40)
    for rank in (0, 1):
        tokens = {
            f"{LAYERS.format(layer)}:{2 * rank + expert}": float(10 * (1 + 2 * rank) + layer)
            for layer in range(mixtures)
            for expert in (0, 1)
        }
        step = {"expert_tokens": sum(tokens.values()), "expert_even": 80.0}
        records = [
            Record(rank, 1000, "step", 41, 41, step),
            Record(rank, 1001, "experts", 41, 41, tokens),
            Record(rank, 1002, "step", 42, 42, step),
        ]
        telemetry.receive(Batch(rank, tuple(records)))
    return telemetry


def scene_of(telemetry: Telemetry) -> Scene:
    return look(telemetry, cell_info(2))


def test_ranks_tell_the_tokens_of_their_experts_and_who_has_most() -> None:
    scene = scene_of(trained())
    table = VIEWS["ranks"].table(scene)
    assert table.head[-2:] == ("experts' tokens", "times an even share")
    assert [row[-2:] for row in table.rows] == [("42", "0.53"), ("122", "1.52")]
    assert "experts of rank 1 get 1.52 times an even share" in VIEWS["ranks"].sentence(scene)


def test_each_expert_of_each_rank_has_its_tokens_in_the_page_and_in_a_board_that_was_kept() -> None:
    scene = scene_of(trained())
    kept = to_bytes(scene)
    assert kept is not None
    for shown in (scene, from_bytes(kept)):
        experts = words_of(shown, "")["experts"]
        assert experts["title"] == "tokens of each expert in step 41: model.layers.*.mlp.experts"
        assert experts["of"] == [[0, 0], [0, 1], [1, 2], [1, 3]]
        assert experts["rows"] == [["0", [10, 10, 30, 30]], ["1", [11, 11, 31, 31]]]
    lines = {name for name, *_ in PointStream(trained()).whole().headers}
    assert "experts" in lines
    assert not any(name.startswith("own.") for name in lines)


def test_of_many_mixtures_the_most_uneven_are_shown_and_the_picture_grows_with_them() -> None:
    few, many = scene_of(trained()), scene_of(trained(40))
    assert many.experts is not None
    assert list(many.experts.shown) == [str(layer) for layer in range(MOST_MIXTURES)]
    assert f"the {MOST_MIXTURES} most uneven of 40" in many.experts.title
    heights = [VIEWS["ranks"].height(scene, 960) for scene in (few, many)]
    assert heights[0] < heights[1]


def test_a_mixture_by_itself_has_its_name_and_what_a_stage_lacks_is_not_known() -> None:
    telemetry = Telemetry()
    for rank, name in enumerate(["a.experts", "b.c.experts"]):
        telemetry.receive(Batch(rank, (Record(rank, 0, "experts", 1, 1, {f"{name}:0": 5.0}),)))
    experts = scene_of(telemetry).experts
    assert experts is not None
    assert list(experts.shown) == ["a", "b.c"]
    np.testing.assert_equal(list(experts.shown.values()), [[5, np.nan], [np.nan, 5]])
    telemetry = Telemetry()
    telemetry.receive(Batch(0, (Record(0, 0, "experts", 1, 1, {"experts:0": 5.0}),)))
    alone = scene_of(telemetry).experts
    assert alone is not None
    assert list(alone.shown) == ["experts"]
    assert alone.title == "tokens of each expert in step 1: experts"


def test_without_ep_nothing_is_said_of_experts() -> None:
    scene = scene_of(training(2, 40))
    assert scene.experts is None
    assert words_of(scene, "")["experts"] is None
    assert not any("expert" in word for word in VIEWS["ranks"].table(scene).head)


@pytest.mark.parametrize("width", [600, 1200])
def test_strips_of_experts_are_in_the_picture_and_no_word_leaves_it(width: int) -> None:
    page = compose(scene_of(trained()), palette.theme_named("light"), width, name="ranks")
    page.pixels()
    words = {text.get_text(): text for text in page.figure.findobj(Text) if text.get_visible()}
    assert "tokens of each expert in step 41: model.layers.*.mlp.experts" in words
    assert "median 20\nmost 30 on 1:2, least 10 on 0:0" in words
    for said, text in words.items():
        box = text.get_window_extent()
        assert not said or -1 <= box.x0 <= box.x1 <= page.width + 1, said
        assert not said or -1 <= box.y0 <= box.y1 <= page.height + 1, said
