"""Learning rates after a fault are those of the step at which training goes on.

A scheduler steps after its optimizer: a fault between the two leaves ranks apart in it alone. What
comes out is compared with a computation in one process.
"""

from pathlib import Path

import pytest
import torch
from torch import nn

from nbdist import RankError, Session

STEPS = 12
PLANS = {
    "StepLR": "StepLR(opt, 2, 0.5)",
    "OneCycleLR": "OneCycleLR(opt, 0.05, total_steps=20)",
    "LambdaLR": "LambdaLR(opt, lambda epoch: 1 / (1 + epoch))",
}
MAKE = """
import pathlib
from torch import nn
from torch.optim import lr_scheduler
POINTS = torch.randn(48, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
FLAG = pathlib.Path({flag!r})
models, opts, plans = [], [], []
for seed in range({models}):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 1)).double()
    layout = nbdist.parallelize(model, {layout!r})
    make = layout.optimizer if layout.name == "zero1" else lambda kind, **options: kind(
        model.parameters(), **options
    )
    opt = make(torch.optim.AdamW, lr=0.02)
    plans.append(lr_scheduler.{plan})
    models.append(model); opts.append(opt)
data = nbdist.loader(POINTS, global_batch=4, shuffle=False)
step = 0
def fail_in(here):
    if rank == 1 and step == {at} and here == {place!r} and not FLAG.exists():
        FLAG.touch()
        raise ValueError("once")
"""
LOOP = """
for points in data:
    for model in models:
        model(points).pow(2).mean().backward()
    fail_in("backward")
    for opt in opts:
        opt.step()
    fail_in("between")
    for plan in plans:
        plan.step()
    for opt in opts:
        opt.zero_grad()
    step += 1
"""
TOLD = """
def whole(model):
    parts = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([part.detach().flatten() for part in parts]).tolist()
planned = [(p.last_epoch, o.param_groups[0]["lr"]) for p, o in zip(plans, opts)]
[whole(model) for model in models], planned
"""


def in_one_process(plan: str, models: int) -> tuple[list[torch.Tensor], list[tuple[int, float]]]:
    """Return the models' parameters, and what their schedulers count and have set."""
    points = torch.randn(48, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    weights, planned = [], []
    for seed in range(models):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 1)).double()
        opt = torch.optim.AdamW(model.parameters(), lr=0.02)
        scheduler = eval(f"torch.optim.lr_scheduler.{PLANS[plan]}", {"torch": torch, "opt": opt})
        for step in range(STEPS):
            model(points[4 * step :][:4]).pow(2).mean().backward()
            opt.step()
            scheduler.step()
            opt.zero_grad()
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        planned.append((scheduler.last_epoch, opt.param_groups[0]["lr"]))
    return weights, planned


def cases() -> list[object]:
    always = {
        ("zero1", "StepLR", "backward", 6),  # goes back, and so must the learning rate
        ("zero1", "StepLR", "backward", 0),  # goes back to before the first step of all
        ("zero3", "StepLR", "backward", 0),
        ("zero3", "StepLR", "between", 0),  # goes back to where one scheduler had not stepped
        ("zero3", "OneCycleLR", "between", 6),
        ("zero3", "StepLR", "backward", 6),  # two go back, of which the second steps later
    }
    every = [
        (layout, plan, place, at)
        for layout in ("ddp", "zero1", "zero2", "zero3")
        for plan in PLANS
        for place in ("backward", "between")
        for at in (0, 1, 6)
        if (layout, plan) != ("zero1", "OneCycleLR")  # which torch refuses
    ]
    assert always <= set(every)
    return [
        pytest.param(*case, marks=() if case in always else (pytest.mark.slow,)) for case in every
    ]


@pytest.mark.parametrize(("layout", "plan", "place", "at"), cases())
def test_schedulers_stand_after_a_fault_where_training_goes_on(
    session: Session, tmp_path: Path, layout: str, plan: str, place: str, at: int
) -> None:
    flag = tmp_path / "failed"
    # zero1 waits in the midst of the first one's step: it would go back alone.
    models = 1 if layout == "zero1" else 2
    made = {"layout": layout, "plan": PLANS[plan], "place": place, "at": at, "models": models}
    session.run(MAKE.format(flag=str(flag), **made), track=False)

    with pytest.raises(RankError, match="once") as error:
        session.run(LOOP, track=False, timeout_s=60)
    assert flag.exists()
    if place == "between":
        assert "rolled back" not in str(error.value)
    session.retry()

    weights, planned = in_one_process(plan, models)
    for of_models, of_plans in session.run(TOLD, track=False).value_list:
        for model, expected in zip(of_models, weights, strict=True):
            torch.testing.assert_close(torch.tensor(model, dtype=torch.float64), expected)
        assert of_plans == planned
    session.run("models = opts = plans = model = opt = plan = layout = None", track=False)


@pytest.mark.parametrize("layout", ["zero1", "zero3"])
@pytest.mark.parametrize("place", ["backward", "between"])
def test_a_loader_that_the_cell_makes_goes_back_to_before_the_first_step_too(
    session: Session, tmp_path: Path, layout: str, place: str
) -> None:
    made = {"layout": layout, "plan": PLANS["StepLR"], "place": place, "at": 0, "models": 1}
    session.run(MAKE.format(flag=str(tmp_path / "failed"), **made), track=False)
    loader = "data = nbdist.loader(POINTS, global_batch=4, shuffle=False)"
    with pytest.raises(RankError, match="once"):
        session.run(f"{loader}{LOOP}", track=False, timeout_s=60)
    session.retry()
    weights, planned = in_one_process("StepLR", 1)
    for of_models, of_plans in session.run(TOLD, track=False).value_list:
        of_model = torch.tensor(of_models[0], dtype=torch.float64)
        torch.testing.assert_close(of_model, weights[0])
        assert of_plans == planned
    session.run("models = opts = plans = model = opt = plan = layout = None", track=False)


def test_two_models_of_a_loop_go_back_to_one_step(session: Session, tmp_path: Path) -> None:
    """Rank 0 waits in the first optimizer's step: that model is torn, and the other whole."""
    made = {"layout": "zero1", "plan": PLANS["StepLR"], "place": "backward", "at": 6, "models": 2}
    session.run(MAKE.format(flag=str(tmp_path / "failed"), **made), track=False)

    with pytest.raises(RankError, match="once") as error:
        session.run(LOOP, track=False, timeout_s=60)

    told = str(error.value)
    assert "rolled back" in told
    assert "The optimizer of Sequential was trained in the same steps: rolled back 5 steps" in told
