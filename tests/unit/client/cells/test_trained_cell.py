"""What a kernel knows of the runs that went well in it."""

from pathlib import Path

from nbdist.client.cells.trained_cell import FinishedRuns
from nbdist.client.expect.expect import Baselines
from nbdist.client.metrics.usual_step import RunFigures


def figures(ranks: int) -> RunFigures:
    return RunFigures(ranks, 40, ({"all_reduce": 1},) * ranks, (41,) * ranks, 644.0, None)


def test_the_newest_run_of_a_name_is_found_among_those_on_as_many_ranks() -> None:
    runs, old, new, fewer = FinishedRuns(), figures(2), figures(2), figures(1)
    for one in (old, new, fewer):
        runs.add("gpt", one)
    assert runs.newest("gpt", 2) is new
    assert runs.newest("gpt", 1) is fewer
    assert runs.newest("gpt", 3) is None
    assert runs.newest("cnn", 2) is None
    assert runs.newest(None, 2) is None


def test_a_run_is_the_baseline_in_the_file_in_which_it_was_stored() -> None:
    baselines, run = Baselines(), figures(2)
    baselines.add(Path("a.json"), run)
    assert baselines.has(Path("a.json"), run)
    assert not baselines.has(Path("b.json"), run)
    assert not baselines.has(Path("a.json"), figures(2))
