"""A fault leaves all that follows a step where the step is, or says what is not.

From a fresh training each: a fault at one place of the step, `retry`, and what comes out compared
with the same training undisturbed. It is equal, or the error named what was left half done.
"""

import itertools
import re
from dataclasses import dataclass

import pytest

from nbdist import RankError, Session

SETUP = """
import torch.nn.functional as F
from torch.optim.lr_scheduler import *
g = torch.Generator().manual_seed(0)
X = torch.randn(96, 8, generator=g)
data = torch.utils.data.TensorDataset(X, X.sum(1, keepdim=True))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
layout = nbdist.parallelize(model, {layout!r})
make = layout.optimizer if {layout!r} == "zero1" else lambda kind, **options: kind(
    model.parameters(), **options
)
opt = make(torch.optim.AdamW, lr=1e-2)
train = nbdist.loader(data, global_batch=16, seed=3)
n = 0
has_failed = False
def fail(place):
    global has_failed
    if place == {place!r} and n == {at} and (rank in {ranks}) and not has_failed:
        has_failed = True
        raise ValueError("bad metric")
class Shadow:
    "An average as many write it: deep, and without a word of its state."
    def __init__(self, module):
        self.kept = {{"weights": {{k: p.detach().clone() for k, p in module.named_parameters()}}}}
    def update(self, module):
        for k, p in module.named_parameters():
            self.kept["weights"][k].data.mul_(0.9).add_(p.detach(), alpha=0.1)
class Warm:
    "A schedule of one's own, without state_dict."
    def __init__(self): self.made = 0
    def step(self):
        self.made += 1
        for group in opt.param_groups: group["lr"] = 1e-2 / (1 + self.made)
{make}
"""
LOOP = """
while train.epoch < 2:
    for x, y in train:
        loss = {scale}F.mse_loss(model(x), y){close}
        loss.backward(); n += 1
        fail("backward")
        {step}
        fail("step")
        {after}
        fail("after")
        opt.zero_grad()
        dist.all_reduce(loss.detach().clone())
        fail("log")
    {epoch}
"""
TOLD = """
def local(t): return t.to_local() if hasattr(t, "to_local") else t
([local(p).detach().double().sum().item() for p in model.parameters()],
 n, opt.param_groups[0]["lr"], {told})
"""


@dataclass(frozen=True)
class Kind:
    """What follows the steps: how it is made, stepped, and what it tells."""

    make: str
    after: str = "pass"
    told: str = "0"
    step: str = "opt.step()"
    scale: str = ""
    close: str = ""
    epoch: str = "pass"


KINDS = {
    "cosine": Kind("sched = CosineAnnealingLR(opt, 40)", "sched.step()", "sched.last_epoch"),
    "sequential": Kind(
        "sched = SequentialLR(opt, [LinearLR(opt), ExponentialLR(opt, 0.9)], [4])",
        "sched.step()",
        "sched.last_epoch",
    ),
    "plateau": Kind(
        "sched = ReduceLROnPlateau(opt, patience=0, threshold=1.0)",
        "sched.step(n)",
        "sched.last_epoch",
    ),
    "every other": Kind(
        "sched = StepLR(opt, 1, 0.9)", "if n % 2 == 0: sched.step()", "sched.last_epoch"
    ),
    "an epoch": Kind(
        "sched = ExponentialLR(opt, 0.5)", told="sched.last_epoch", epoch="sched.step()"
    ),
    "own schedule": Kind("sched = Warm()", "sched.step()", "sched.made"),
    "averaged": Kind(
        "ema = torch.optim.swa_utils.AveragedModel(model, avg_fn=lambda a, p, i: 0.9*a + 0.1*p)",
        "ema.update_parameters(model)",
        "[p.double().sum().item() for p in ema.parameters()]",
    ),
    "shadow": Kind(
        "ema = Shadow(model)",
        "ema.update(model)",
        "[p.double().sum().item() for p in ema.kept['weights'].values()]",
    ),
    "scaler": Kind(
        "scaler = torch.amp.GradScaler('cpu', init_scale=2.0**10, growth_interval=3)",
        "scaler.update()",
        "scaler.get_scale()",
        step="scaler.step(opt)",
        scale="scaler.scale(",
        close=")",
    ),
    "accumulated": Kind("", step="if n % 4 == 0: opt.step()\n        else: continue"),
    "held": Kind(
        "class Trainer: pass\ntrainer = Trainer()\n"
        "trainer.parts = {'sched': [SequentialLR(opt, [LinearLR(opt), StepLR(opt, 2)], [3])]}\n"
        "trainer.count = 0",
        "trainer.parts['sched'][0].step(); trainer.count += 1",
        "(trainer.parts['sched'][0].last_epoch, trainer.count)",
    ),
}
PLACES = ("backward", "step", "after", "log")
LAYOUTS = ("ddp", "zero1", "zero3")
WHO = ("(1,)", "(0,)", "(0, 1)")


def run_training(session: Session, kind: Kind, retries: int = 0) -> object:
    """Run the loop and return what all ranks tell of the end."""
    code = LOOP.format(
        **{k: getattr(kind, k) for k in ("scale", "close", "step", "after", "epoch")}
    )
    session.run(code, track=False, timeout_s=60, retry=retries)
    return session.run(TOLD.format(told=kind.told), track=False).value_list


def set_up(
    session: Session, kind: Kind, layout: str, place: str = "", who: str = "()", at: int = 5
) -> None:
    code = SETUP.format(layout=layout, place=place, ranks=who, at=at, make=kind.make)
    session.run(code, track=False)


def cases() -> list[object]:
    """Return all cases, of which those of `make test` meet each pair of values once."""
    every = list(itertools.product(KINDS, PLACES, LAYOUTS, WHO))
    chosen: set[tuple[str, str, str, str]] = set()
    met: set[tuple[object, ...]] = set()
    for case in every:
        pairs = set(itertools.combinations(enumerate(case), 2))
        if len(pairs - met) >= 3:
            chosen.add(case)
            met |= pairs
    skipped = {c for c in every if "averaged" in c and "zero3" in c}  # torch copies no such model
    return [
        pytest.param(*case, marks=() if case in chosen else (pytest.mark.slow,))
        for case in every
        if case not in skipped
    ]


_right: dict[tuple[str, str], object] = {}


@pytest.mark.parametrize(("name", "place", "layout", "who"), cases())
def test_all_that_follows_a_step_is_right_after_a_fault_or_named(
    session: Session, name: str, place: str, layout: str, who: str
) -> None:
    kind = KINDS[name]
    if (name, layout) not in _right:
        set_up(session, kind, layout)
        _right[name, layout] = run_training(session, kind)
    right = _right[name, layout]

    at = 12 if name == "accumulated" and place != "backward" else 6 if name == "an epoch" else 5
    set_up(session, kind, layout, place, who, at)
    with pytest.raises(RankError, match="bad metric") as failed:
        run_training(session, kind)
    if "half done" in str(failed.value):
        assert place == "step"
        named = re.search(r"distributed -r (\d)", str(failed.value))
        ranks = named[1] if named else "all"
        session.run(kind.after, ranks=ranks, track=False)  # as the error says
    session.retry()

    assert session.run(TOLD.format(told=kind.told), track=False).value_list == right


def test_a_cell_with_retries_does_not_go_on_by_itself_after_half_a_step(session: Session) -> None:
    kind = KINDS["cosine"]
    set_up(session, kind, "ddp", "step", "(0, 1)")
    with pytest.raises(RankError, match="bad metric") as failed:
        run_training(session, kind, retries=2)
    assert "a step is half done" in str(failed.value)

    # Where one rank did the rest of it, the cell goes on.
    set_up(session, kind, "ddp", "step", "(0,)")
    run_training(session, kind, retries=2)


ODD = """
import threading
class Odd:
    "Its state can be read by nobody, or be sent to nobody."
    def __init__(self, how): self.how, self.made = how, 0
    def step(self): self.made += 1
    def state_dict(self):
        if self.how == "raises": raise RuntimeError("no state")
        return {"lock": threading.Lock()}
    def load_state_dict(self, state): pass
raising, locked = Odd("raises"), Odd("locked")
sched = CosineAnnealingLR(opt, 40)
"""


@pytest.mark.parametrize("layout", ["ddp", "zero1"])
def test_an_object_whose_state_cannot_be_read_costs_nothing_but_itself(
    session: Session, layout: str
) -> None:
    kind = Kind(ODD, "sched.step(); raising.step(); locked.step()", "sched.last_epoch")
    set_up(session, kind, layout)
    right = run_training(session, kind)
    set_up(session, kind, layout, "backward", "(1,)")
    with pytest.raises(RankError, match="bad metric") as failed:
        run_training(session, kind)
    if layout == "ddp":
        assert "locked (Odd) and raising (Odd) have not followed it" in str(failed.value)
    session.retry()
    assert session.run(TOLD.format(told=kind.told), track=False).value_list == right
