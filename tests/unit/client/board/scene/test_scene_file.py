"""A board that is drawn again from what was kept of it."""

import gzip
import json
from dataclasses import replace

import numpy as np
import pytest

from nbdist.client.board import VIEWS, palette
from nbdist.client.board.past import Past
from nbdist.client.board.scene import scene_file
from nbdist.client.board.scene.look import look
from nbdist.client.board.scene.scene import Scene
from nbdist.client.board.scene.scene_file import MOST_BYTES, MOST_POINTS, from_bytes, to_bytes
from tests.unit.client.board.board_data import analysis_of, cell_info, training

THEME = palette.theme_named("auto")


def finished(ranks: int, steps: int) -> Scene:
    known = analysis_of(ranks, steps, slow=1, buckets=24)
    return replace(look(training(ranks, steps), cell_info(ranks), known), outcome="finished")


def kept(scene: Scene) -> Scene:
    data = to_bytes(scene)
    assert data is not None
    return from_bytes(data)


@pytest.mark.parametrize(("ranks", "steps"), [(2, 80), (2, 19_000), (8, 3000)])
def test_every_word_and_table_is_the_same_however_long_the_training_was(
    ranks: int, steps: int
) -> None:
    scene = finished(ranks, steps)
    before, after = Past(scene, THEME), Past(kept(scene), THEME)
    for name in VIEWS:
        assert after.plain(name) == before.plain(name)
        assert after.words(name) == before.words(name)
        assert after.caption(name) == before.caption(name)


def test_marks_of_steps_are_kept() -> None:
    scene = replace(finished(2, 20), marks=((7, "lr 0.1 -> 0.01"),))
    assert kept(scene).marks == ((7, "lr 0.1 -> 0.01"),)


def test_the_pictures_of_a_short_training_are_the_same_to_the_pixel() -> None:
    scene = finished(2, 80)
    before, after = Past(scene, THEME), Past(kept(scene), THEME)
    for name in VIEWS:
        assert after.png(name) == before.png(name)


def test_a_long_history_of_many_ranks_stays_small_and_keeps_its_peaks() -> None:
    scene = finished(32, 1500)
    data = to_bytes(scene)
    assert data is not None
    assert len(data) <= MOST_BYTES
    for before, after in zip(scene.panels, from_bytes(data).panels, strict=True):
        for line, thinned in zip(before.lines, after.lines, strict=True):
            assert len(thinned.y) <= MOST_POINTS
            assert (thinned.y.min(), thinned.y.max()) == (line.y.min(), line.y.max())
            assert np.array_equal(thinned.y[-50:], line.y[-50:])


def test_a_line_tells_how_many_points_it_had() -> None:
    (loss, *_) = kept(finished(2, 9000)).panels
    assert [line.of for line in loss.lines] == [9000, 9000]
    (loss, *_) = kept(finished(2, 50)).panels
    assert [line.of for line in loss.lines] == [0, 0], "it has them all"


@pytest.mark.parametrize("most", [101, 107, 199])
def test_a_scene_that_cannot_be_made_small_is_not_kept(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scene_file, "MOST_BYTES", 1)
    monkeypatch.setattr(scene_file, "MOST_POINTS", most)
    assert to_bytes(finished(2, 400)) is None


def test_before_a_scene_is_not_kept_the_parts_over_the_steps_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = finished(2, 19_000)
    assert scene.history
    monkeypatch.setattr(scene_file, "MOST_POINTS", 100)
    monkeypatch.setattr(scene_file, "MOST_BYTES", len(to_bytes(replace(scene, history=())) or b""))
    data = to_bytes(scene)
    assert data is not None
    assert from_bytes(data).history == ()
    assert Past(from_bytes(data), THEME).png("step")


def test_numbers_that_are_none_come_back_as_they_were() -> None:
    scene = finished(2, 40)
    line = scene.panels[0].lines[0]
    line.y[:3] = np.nan, np.inf, -np.inf
    assert np.array_equal(kept(scene).panels[0].lines[0].y, line.y, equal_nan=True)


def test_a_field_of_another_version_is_passed_over_or_takes_its_default() -> None:
    data = to_bytes(finished(2, 40))
    assert data is not None
    content = json.loads(gzip.decompress(data))
    content["scene"]["of_tomorrow"] = 1
    del content["scene"]["analysis"]["links"]
    assert from_bytes(gzip.compress(json.dumps(content).encode())).analysis.links == {}


@pytest.mark.parametrize(
    "content",
    [
        {"version": 2, "scene": {}},
        {"version": 1, "scene": {}},
        {"version": 1, "scene": {"panels": 3, "recent": [], "rows": [], "epoch": None}},
        {"version": 1, "scene": {"panels": ["x"], "recent": [], "rows": [], "epoch": None}},
        {"version": 1, "scene": {"panels": [], "recent": [["0", 1]], "rows": [], "epoch": None}},
        [],
    ],
)
def test_what_is_no_scene_of_ours_is_refused(content: object) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - whatever the reason
        from_bytes(gzip.compress(json.dumps(content).encode()))


def test_a_damaged_file_is_refused() -> None:
    data = to_bytes(finished(2, 40))
    assert data is not None
    nested = gzip.compress(b"[" * 200_000)
    for damaged in (b"", b"no gzip", data[: len(data) // 2], nested):
        with pytest.raises(ValueError):  # noqa: PT011 - whatever the reason
            from_bytes(damaged)
