"""The learning rate follows the global batch: never twice, and beside a schedule of one's own."""

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.optim import Optimizer  # noqa: E402
from torch.optim.lr_scheduler import (  # noqa: E402
    ChainedScheduler,
    CosineAnnealingLR,
    LambdaLR,
    SequentialLR,
    StepLR,
)

from nbdist.engine.data.lr_scaling import BatchScaledLR, scale_lr  # noqa: E402
from nbdist.shared.errors import UsageError  # noqa: E402


def optimizer(rate: float = 0.1, **options: Any) -> Optimizer:
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    groups = [{"params": weights[:1]}, {"params": weights[1:], "lr": rate / 10}]
    return torch.optim.SGD(groups, lr=rate, **options)


def rates_of(opt: Optimizer, scheduler: object, steps: int) -> list[float]:
    """Return the first group's rate at each of the next steps."""
    seen = []
    for _ in range(steps):
        seen.append(float(opt.param_groups[0]["lr"]))
        opt.step()
        scheduler.step()  # type: ignore[attr-defined]
    return seen


@pytest.mark.parametrize(("rule", "times"), [("linear", 4.0), ("sqrt", 2.0)])
def test_rates_of_all_groups_grow_by_the_rule(rule: str, times: float) -> None:
    opt = optimizer()
    scale_lr(opt, global_batch=256, reference_batch=64, rule=rule)
    assert [g["lr"] for g in opt.param_groups] == pytest.approx([0.1 * times, 0.01 * times])


def test_a_smaller_batch_has_a_smaller_rate_and_no_warm_up() -> None:
    opt = optimizer()
    warmup = scale_lr(opt, global_batch=16, reference_batch=64, warmup_steps=10)
    assert rates_of(opt, warmup, 3) == pytest.approx([0.025] * 3)


def test_a_warm_up_rises_in_equal_parts_from_the_reference_rate_and_stays() -> None:
    opt = optimizer()
    warmup = scale_lr(opt, global_batch=320, reference_batch=64, warmup_steps=4)
    assert rates_of(opt, warmup, 7) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.5])


def test_the_same_call_changes_nothing_and_returns_the_same_scheduler() -> None:
    opt = optimizer()

    def scaled() -> BatchScaledLR:
        return scale_lr(opt, global_batch=320, reference_batch=64, warmup_steps=4)

    warmup = scaled()
    rates_of(opt, warmup, 2)
    assert scaled() is warmup
    assert rates_of(opt, warmup, 3) == pytest.approx([0.3, 0.4, 0.5])


def test_a_call_whose_scheduler_was_dropped_does_not_scale_again() -> None:
    opt = optimizer()
    for _ in range(2):
        scale_lr(opt, global_batch=128, reference_batch=64)
    opt.param_groups[0]["lr"] = 0.05  # a schedule of the user's has moved it
    scale_lr(opt, global_batch=128, reference_batch=64)
    assert opt.param_groups[0]["lr"] == 0.05


def test_other_numbers_begin_anew_from_the_reference_rate() -> None:
    opt = optimizer()
    scale_lr(opt, global_batch=128, reference_batch=64)
    scale_lr(opt, global_batch=256, reference_batch=64)
    assert opt.param_groups[0]["lr"] == pytest.approx(0.4)
    scale_lr(opt, global_batch=64, reference_batch=64)
    assert opt.param_groups[0]["lr"] == pytest.approx(0.1)


def alone(make: "object", rate: float, steps: int) -> list[float]:
    """Return the rates of the user's own schedule where nothing was scaled."""
    opt = optimizer(rate)
    return rates_of(opt, make(opt), steps)  # type: ignore[operator]


def test_a_schedule_of_ones_own_multiplies_with_the_warm_up() -> None:
    opt = optimizer()
    warmup = scale_lr(opt, global_batch=128, reference_batch=64, warmup_steps=5)
    both = ChainedScheduler([warmup, CosineAnnealingLR(opt, T_max=20)])
    seen = rates_of(opt, both, 15)
    cosine = alone(lambda o: CosineAnnealingLR(o, T_max=20), 0.2, 15)
    rise = [min(1.0, 0.5 + 0.1 * step) for step in range(15)]
    assert seen == pytest.approx([a * b for a, b in zip(cosine, rise, strict=True)])


@pytest.mark.parametrize(
    "make",
    [
        lambda o: LambdaLR(o, lambda step: 0.9**step),
        lambda o: StepLR(o, step_size=2, gamma=0.5),
        lambda o: CosineAnnealingLR(o, T_max=20),
    ],
    ids=["lambda", "step", "cosine"],
)
def test_a_schedule_after_the_warm_up_begins_at_the_scaled_rate(make: "object") -> None:
    opt = optimizer()
    warmup = scale_lr(opt, global_batch=128, reference_batch=64, warmup_steps=4)
    both = SequentialLR(opt, [warmup, make(opt)], milestones=[4])  # type: ignore[operator]
    seen = rates_of(opt, both, 10)
    assert seen[:4] == pytest.approx([0.1, 0.125, 0.15, 0.175])
    assert seen[4:] == pytest.approx(alone(make, 0.2, 6))


def test_its_state_goes_on_in_the_midst_of_the_warm_up() -> None:
    unbroken = optimizer()
    warmup = scale_lr(unbroken, global_batch=128, reference_batch=64, warmup_steps=6)
    rates_of(unbroken, warmup, 3)
    kept = copy.deepcopy((unbroken.state_dict(), warmup.state_dict()))

    resumed = optimizer()
    again = scale_lr(resumed, global_batch=128, reference_batch=64, warmup_steps=6)
    resumed.load_state_dict(kept[0])
    again.load_state_dict(kept[1])
    rest = rates_of(unbroken, warmup, 5)
    assert rates_of(resumed, again, 5) == rest
    # The loaded state knows the reference rate, too.
    assert scale_lr(resumed, global_batch=128, reference_batch=64, warmup_steps=6) is again


def test_a_rate_that_is_a_tensor_is_written_in_place() -> None:
    rate = torch.tensor(0.1)
    opt = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=rate, capturable=True)
    held = opt.param_groups[0]["lr"]
    warmup = scale_lr(opt, global_batch=128, reference_batch=64, warmup_steps=2)
    assert opt.param_groups[0]["lr"] is held
    assert [round(rate, 4) for rate in rates_of(opt, warmup, 3)] == [0.1, 0.15, 0.2]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"global_batch": 0}, "global_batch=0 is not a batch size"),
        ({"reference_batch": 2.0}, "reference_batch=2.0 is not a batch size"),
        ({"warmup_steps": -1}, "warmup_steps=-1 is not a number of steps"),
        ({"rule": "cubic"}, '"cubic" is not a known rule'),
    ],
)
def test_a_wrong_word_is_refused_and_nothing_changed(asked: dict[str, object], words: str) -> None:
    opt = optimizer()
    with pytest.raises(UsageError, match=words):
        scale_lr(opt, **{"global_batch": 2, "reference_batch": 1, **asked})  # type: ignore[arg-type]
    assert opt.param_groups[0]["lr"] == 0.1
    assert "reference_lr" not in opt.param_groups[0]


def test_what_is_no_optimizer_is_refused() -> None:
    with pytest.raises(UsageError, match="got a Linear"):
        scale_lr(torch.nn.Linear(1, 1), global_batch=2, reference_batch=1)


def test_a_scheduler_made_before_is_refused_for_it_has_noted_the_old_rate() -> None:
    opt = optimizer()
    StepLR(opt, 1)
    with pytest.raises(UsageError, match="made before its rates are scaled"):
        scale_lr(opt, global_batch=2, reference_batch=1)
