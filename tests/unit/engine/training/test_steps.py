"""A rank's pace is its own work alone, over its last steps; which step a call belongs to."""

from nbdist.engine.training.steps import PACE_STEPS, Pace, StepRule


def step(samples: float, compute_s: float, data_s: float, comm_s: float) -> dict[str, float]:
    return {"samples": samples, "compute_s": compute_s, "data_s": data_s, "comm_s": comm_s}


def test_a_pace_is_samples_over_own_work_and_waiting_is_none() -> None:
    pace = Pace()
    for wait_s in (0.0, 5.0, 1.0):
        pace.note(step(8, 0.15, 0.05, wait_s))
    assert pace.now() == 8 / 0.2


def test_a_pace_is_not_known_from_two_steps_or_without_samples_or_waits() -> None:
    pace = Pace()
    for values in (step(8, 0.2, 0.0, 0.0), step(8, 0.2, 0.0, 0.0), {"compute_s": 0.1}):
        pace.note(values)
    unknown = step(8, 0.2, 0.0, 0.0)
    del unknown["comm_s"]  # it is in compute_s then
    pace.note(unknown)
    assert pace.now() == 0


def test_a_pace_forgets_what_is_long_ago() -> None:
    pace = Pace()
    for compute_s in [1.0] * PACE_STEPS + [0.5] * PACE_STEPS:
        pace.note(step(4, compute_s, 0.0, 0.0))
    assert pace.now() == 8


def test_a_call_belongs_to_the_step_that_its_iteration_ends() -> None:
    rule, ended, steps = StepRule(), 0, []
    for optimizer in (1, 2, 3) * 4:
        ended += rule.leads(optimizer) or rule.closes(optimizer)
        steps.append(ended + rule.is_between)
    assert steps == [1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4]
