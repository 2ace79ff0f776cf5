"""A step of a pipeline, from what its ranks have measured."""

from nbdist.client.board.scene.scene import Scene
from nbdist.client.board.scene.scene_file import from_bytes, to_bytes
from nbdist.client.board.scene.stages import PipelineStep, pipeline_of
from nbdist.shared.wire import stage_values

AT_S = 1.7e9


def told(*works: tuple[str, int, int, float, float]) -> dict[str, float]:
    """Return a rank's row; moments in milliseconds."""
    values: dict[str, float] = {}
    for kind, stage, number, begin, end in works:
        values |= stage_values(kind, stage, number, AT_S + begin / 1e3, AT_S + end / 1e3)
    return values


FIRST = told(("F", 0, 0, 0, 10), ("F", 0, 1, 10, 20), ("B", 0, 0, 40, 60), ("B", 0, 1, 60, 80))
SECOND = told(("F", 1, 0, 10, 20), ("B", 1, 0, 20, 40), ("F", 1, 1, 40, 50), ("B", 1, 1, 50, 60))


def step() -> PipelineStep:
    found = pipeline_of({0: {4: FIRST, 2: FIRST, 8: FIRST}, 1: {4: SECOND, 2: SECOND}})
    assert found is not None
    return found


def test_the_newest_step_that_all_ranks_told_of_is_shown() -> None:
    assert step().step == 4
    assert pipeline_of({0: {4: FIRST}, 1: {2: SECOND}}) is None
    assert pipeline_of({}) is None


def test_work_is_in_the_order_of_time_from_the_first_of_all_ranks() -> None:
    runs = step().of_rank(1)
    assert [f"{run.kind}{run.micro_batch}" for run in runs] == ["F0", "B0", "F1", "B1"]
    assert abs(runs[0].begin_ms - 10) < 0.01
    assert abs(step().length_ms - 80) < 0.01


def test_its_words_say_that_it_is_measured_and_how_much_is_work() -> None:
    assert str(step()) == (
        "Step 4 of a pipeline, as measured: 2 ranks, 2 micro-batches, 80.0 ms, "
        "of which ranks worked 69 %.\nrank 0: F0 F1 B0 B1\nrank 1: F0 B0 F1 B1"
    )


def test_where_a_rank_has_two_stages_words_name_them() -> None:
    found = pipeline_of({0: {1: told(("F", 0, 0, 0, 1), ("F", 2, 0, 1, 2))}})
    assert str(found).splitlines()[1] == "rank 0: F0.0 F0.2"


def test_a_board_that_is_kept_has_it_too() -> None:
    packed = to_bytes(Scene((), {}, (), None, emulated="2 GFLOP/s, 1 GB/s", pipeline=step()))
    assert packed is not None
    read = from_bytes(packed)
    assert (read.pipeline, read.emulated) == (step(), "2 GFLOP/s, 1 GB/s")
