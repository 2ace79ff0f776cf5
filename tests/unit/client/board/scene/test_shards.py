"""One step with parameters in shards, of what ranks measured."""

from dataclasses import replace

from nbdist.client.board.scene.shards import shards_of
from nbdist.client.metrics.analysis.values import Analysis, TimelineLane
from tests.unit.client.board.shard_data import in_shards


def test_a_unit_is_gathered_freed_gathered_again_and_reduced() -> None:
    step = shards_of(in_shards(3, 4))
    assert step is not None
    assert step.bytes == {"blocks.0": 1_000_000, "blocks.1": 1_000_000, "blocks.2": 1_000_000}
    of_one = [(run.kind, run.begin_ms, run.end_ms) for run in step.runs if run.unit == "blocks.1"]
    assert of_one == [
        ("gathered", 10.0, 12.0),
        ("whole", 12.0, 15.0),
        ("again", 40.0, 42.0),
        ("whole", 42.0, 45.0),
        ("reduced", 46.0, 48.0),
    ]
    lines = str(step).splitlines()
    assert "on 4 ranks, as rank 0 measured it: 60.0 ms, at most 33 % of 3.0 MB whole" in lines[0]
    assert "That a rank keeps 1/4 of all is the algorithm's." in lines[0]
    assert lines[2] == (
        "blocks.1 (1.0 MB): gathered 10.0-12.0, freed 15.0, gathered again 40.0-42.0, "
        "freed 45.0, gradients reduced 46.0-48.0 ms"
    )


def test_what_was_not_freed_stays_whole_and_nothing_says_that_it_was() -> None:
    step = shards_of(in_shards(2, 2, is_freed=False))
    assert step is not None
    assert step.most == 1.0
    assert str(step).count("freed") == 2  # after forward alone


def test_on_a_gpu_python_may_free_before_a_gather_is_over() -> None:
    analysis = in_shards(1, 2)
    assert analysis.line is not None
    (lane,) = analysis.line.lanes
    early = tuple(replace(s, freed_ms=s.freed_ms and s.begin_ms) for s in lane.spans)
    line = replace(analysis.line, lanes=(TimelineLane(0, early, ()),))
    step = shards_of(replace(analysis, line=line))
    assert step is not None
    assert all(run.begin_ms == run.end_ms for run in step.runs if run.kind == "whole")


def test_a_training_without_shards_has_none() -> None:
    assert shards_of(Analysis()) is None
    analysis = in_shards(2, 2)
    assert analysis.line is not None
    (lane,) = analysis.line.lanes
    bare = tuple(replace(span, unit="") for span in lane.spans)
    line = replace(analysis.line, lanes=(TimelineLane(0, bare, ()),))
    assert shards_of(replace(analysis, line=line)) is None
