"""What a training did as moving pictures."""

import io

import numpy as np
from PIL import Image

from nbdist.client.board.drawn import pipeline, ring, shards
from nbdist.client.board.drawn.animation import FRAMES, LAST_MS
from nbdist.client.board.scene.scene import Scene
from nbdist.client.board.scene.stages import PipelineStep, StageRun
from nbdist.client.metrics.analysis.values import Analysis, CollectiveRow
from tests.unit.client.board.shard_data import in_shards

MOST_BYTES = 120_000


def scene(
    step: PipelineStep | None = None, analysis: Analysis | None = None, emulated: str = ""
) -> Scene:
    return Scene(
        (), {}, (), None, analysis=analysis or Analysis(), emulated=emulated, pipeline=step
    )


def steps(ranks: int = 8, micro_batches: int = 16) -> PipelineStep:
    runs = [
        StageRun(rank, kind, rank, number, at, at + 9)
        for rank in range(ranks)
        for number in range(micro_batches)
        for kind, at in (("F", 10.0 * (rank + number)), ("B", 400 + 10.0 * (number - rank)))
    ]
    return PipelineStep(8, tuple(runs))


def test_it_is_small_and_ends_with_all_of_the_work() -> None:
    shown = pipeline.animate(scene(steps()))
    assert len(shown.gif) < MOST_BYTES
    with Image.open(io.BytesIO(shown.gif)) as image:
        assert getattr(image, "n_frames", 1) == FRAMES + 1
        first = np.asarray(image.convert("RGB")).astype(int)
        image.seek(FRAMES)
        assert image.info["duration"] == LAST_MS
        last = np.asarray(image.convert("RGB")).astype(int)
    assert last.sum() < first.sum()  # pale places have filled


def test_a_notebook_gets_a_picture_without_scripts_and_with_words() -> None:
    shown = pipeline.animate(scene(steps(), emulated="2 GFLOP/s, 100 Mbit/s"))._repr_mimebundle_()
    assert shown["text/html"].startswith('<img alt="Emulated: 2 GFLOP/s, 100 Mbit/s. Step 8')
    assert "<script" not in shown["text/html"]
    assert "rank 7: F0" in shown["text/plain"]


def test_the_ring_of_many_ranks_is_small_too_and_names_what_is_emulated() -> None:
    said = ("all_reduce", "", tuple(range(64)), "", "float32", 1_600_000, 1, 0, 0, 0)
    row = CollectiveRow(*said, 221.0, None, None, None)
    shown = ring.animate(scene(analysis=Analysis(table=(row,)), emulated="2 GFLOP/s, 1 GB/s"))
    assert len(shown.gif) < MOST_BYTES
    assert shown.text.startswith("Emulated: 2 GFLOP/s, 1 GB/s. The ring of an all_reduce of 1.6 MB")


def test_shards_of_many_units_are_small_and_low_too() -> None:
    shown = shards.animate(scene(analysis=in_shards(48, 64)))
    assert len(shown.gif) < MOST_BYTES
    with Image.open(io.BytesIO(shown.gif)) as image:
        assert image.height < 800
    assert len(shown.text.splitlines()) == 49
