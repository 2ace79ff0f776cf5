"""A training with whatever follows its steps, drawn at random, and a fault at any place of a step.

Twice in the trial's session: undisturbed, and with the fault. What the error advises is done, and
the cell run again: all that follows must be as in the first. The parts are those of
`tests/cluster/test_half_steps`, in any company and order. Main thread, which an interrupt strikes.
"""

import random
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from nbdist import Session
from tests.cluster import test_half_steps as half_steps
from tests.cluster.test_half_steps import Kind
from tests.random.calls import Row
from tests.random.world import World

# What may follow a step: how it is made, its step, and what it tells.
PARTS = {
    "cosine": ("p1 = CosineAnnealingLR(opt, 40)", "p1.step()", "p1.last_epoch"),
    "sequential": (
        "p2 = SequentialLR(opt, [LinearLR(opt), ExponentialLR(opt, 0.9)], [4])",
        "p2.step()",
        "p2.last_epoch",
    ),
    "plateau": (
        "p3 = ReduceLROnPlateau(opt, patience=0, threshold=1.0)",
        "p3.step(n)",
        "p3.last_epoch",
    ),
    "average": (
        "e1 = torch.optim.swa_utils.AveragedModel(model, avg_fn=lambda a, p, i: 0.9*a + 0.1*p)",
        "e1.update_parameters(model)",
        "[p.double().sum().item() for p in e1.parameters()]",
    ),
    "shadow": (
        "e2 = Shadow(model)",
        "e2.update(model)",
        "[p.double().sum().item() for p in e2.kept['weights'].values()]",
    ),
    "weights": ("", "weights = [local(p.data).mul_(0.99) for p in model.parameters()]", "0"),
    "counter": (
        "class Held: pass\nc1 = Held(); c1.seen = 0",
        "c1.seen += 1",
        "c1.seen",
    ),
    "second optimizer": (
        "opt2 = layout.optimizer(torch.optim.AdamW, model[2].parameters(), lr=3e-3)",
        "opt2.step(); opt2.zero_grad()",
        "0",
    ),
}
_TRAINED = "model[0].parameters(), "  # beside a second optimizer


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a seed gives: a training, and the fault in it."""

    kind: Kind
    names: tuple[str, ...]
    layout: str
    place: str
    who: tuple[int, ...]
    fault: str


def draw(seed: int, n: int, *, can_save: bool = True) -> Drawn:
    """Return the training of a seed, on `n` ranks; without checkpoints unless it `can_save`."""
    chance = random.Random(f"steps {seed}")
    fault = chance.choice(list(half_steps.STRIKE))
    layout = "ddp" if fault == "kill" else chance.choice(half_steps.LAYOUTS)
    possible = [name for name in PARTS if (name, layout) != ("average", "zero3")]
    if not can_save:
        possible.remove("second optimizer")
    names = chance.sample(possible, chance.randint(1, 4))
    if "second optimizer" in names:  # its half steps need a checkpoint, which has no plain values
        names = [name for name in names if name not in ("shadow", "counter")]
    has_scaler = chance.random() < 0.3 and "second optimizer" not in names
    every = chance.choice((1, 1, 2, 3))
    after = [PARTS[name][1] for name in names]
    if has_scaler:
        after.insert(0, "scaler.update()")  # before whatever else: a loop has it there
    steps = "; ".join(f"{part}; fail('after {at}')" for at, part in enumerate(after))
    stepped = "scaler.step(opt)" if has_scaler else "opt.step()"
    made = [PARTS[name][0] for name in names]
    told = [PARTS[name][2] for name in names]
    if has_scaler:
        made.append("scaler = torch.amp.GradScaler('cpu', init_scale=2.0**10, growth_interval=2)")
        told.append("scaler.get_scale()")
    if chance.random() < 0.3:
        made.append("train = nbdist.loader(Noisy(), global_batch=16, seed=3, num_workers=2)")
    place = chance.choice(["backward", "step", *(f"after {i}" for i in range(len(after))), "log"])
    # A batch at which the optimizer steps; of its first step nobody can tell what follows it.
    whole = every * chance.randint(2, 12 // every)
    kind = Kind(
        "\n".join(made),
        steps,
        f"({', '.join(told)},)",
        step=f"if n % {every} == 0: {stepped}\n        else: continue" if every > 1 else stepped,
        scale="scaler.scale(" if has_scaler else "",
        close=")" if has_scaler else "",
        trained=_TRAINED if "second optimizer" in names else "",
        at=chance.randint(1, 12),
        later=whole,
        saved="model" if "second optimizer" in names else "",
    )
    count = 1 if fault == "kill" else chance.choice((1, n))
    return Drawn(
        kind, tuple(names), layout, place, tuple(sorted(chance.sample(range(n), count))), fault
    )


def train(world: World, seed: int) -> None:
    """Train undisturbed and with the fault, and compare."""
    # Where ranks hold different models nothing is saved.
    drawn, calls = draw(seed, world.n, can_save=not world.is_uneven), world.calls
    session = calls.session
    calls.row = Row("steps", drawn.fault, drawn.layout, "went on")
    world.driven.rows.append(calls.row)
    world.driven.story.append(f"### {drawn}")
    try:
        right, told, said = _both(session, drawn)
    except (Exception, pytest.fail.Exception) as error:
        if "Ranks hold different trainings" in str(error):  # since a fault of this trial's
            calls.row.outcome = "refused"
            return
        calls.find("an error in a step", f"{drawn}: {type(error).__name__}: {error}")
        return
    world.driven.story.append("\n".join(f"# {line}" for line in said.splitlines()))
    if told != right:
        calls.find("wrong after a fault in a step", f"{drawn}: {told}, not {right}")


def _both(session: Session, drawn: Drawn) -> tuple[object, object, str]:
    """Return what all tell of the undisturbed training and of the other, and what was said."""
    kind, who = drawn.kind, repr(drawn.who)
    half_steps.set_up(session, kind, drawn.layout)
    right = half_steps.run_training(session, kind)
    folder = Path(tempfile.mkdtemp(dir=Path.cwd()))
    half_steps.set_up(session, kind, drawn.layout, drawn.place, who, folder, drawn.fault)
    said = half_steps.fail_training(session, kind, drawn.fault, who, folder)
    half_steps.do_as_said(session, kind, said)
    session.retry()
    told = session.run(half_steps.TOLD.format(told=kind.told), track=False).value_list
    return right, told, said
