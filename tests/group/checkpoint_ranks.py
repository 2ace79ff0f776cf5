"""What the ranks run in test_checkpoint: a training that is saved here and goes on there."""

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import nbdist
from nbdist.engine.checkpoint import rest, save, training_state
from nbdist.engine.compat import torch_live
from nbdist.engine.component import EndedCell
from nbdist.engine.data.make import loader as make_loader
from nbdist.engine.layout.layout import Layout
from nbdist.engine.layout.parallelize import parallelize
from nbdist.engine.recovery import recovery
from nbdist.engine.steps import keep, step_state
from nbdist.shared.wire import CellStart
from tests.group import models, parity_cases
from tests.group.layout_ranks import whole
from tests.group.parity_cases import Case
from tests.group.parity_ranks import GPT, move
from tests.group.tensor_parallel_ranks import T, V, loss_of

SAMPLES, BATCH = 96, 16
State = dict[str, Tensor]


class Dropping(GPT):
    """The model of test_parity, with dropout before its head."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.2)

    def forward(self, x_BT: Tensor) -> Tensor:
        x_BTD = self.token(x_BT) + self.position.weight
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.drop(self.norm(x_BTD)))


class Average:
    """An average of a weight's sum, which is a rank's own: something to keep."""

    def __init__(self) -> None:
        self.value = 0.0

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": GPT,
    "dropping": Dropping,
    "conv": models.ConvNet,
    "tied": models.GPT,
}


class Training:
    """One training as a cell has it."""

    def __init__(self, case: Case, name: str = "", seed: int | None = None) -> None:
        recovery.install()
        kind = name or case.model
        torch.manual_seed(dist.get_rank() if seed is None else seed)
        self.case, self.kind = case, kind
        model = MODELS[kind]().to(getattr(torch, case.dtype))
        self.layout: Layout = parallelize(model, case.layout, *parity_cases.policies_of(case))
        self.opt = self.layout.optimizer(torch.optim.AdamW, lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.opt, 2, 0.5)
        self.loader = make_loader(_dataset(kind), global_batch=BATCH, seed=3)
        self.average = Average()
        nbdist.keep(average=self.average)

    def train(self, steps: int, at: int | None = None, do: Callable[[], Any] | None = None) -> None:
        """Make steps; after the `at`-th of them, `do` something in the midst of the loop."""
        made = 0
        while made < steps:
            for x, y in self.loader:
                self._step(x, y)
                made += 1
                if made == at and do is not None:
                    do()
                if made == steps:
                    break

    def _step(self, x: Tensor, y: Tensor) -> None:
        def loss_fn(out: Tensor, y: Tensor) -> Tensor:
            return loss_of(out, y) if self.kind != "conv" else models.loss_of("conv", out, y)

        if self.case.microbatches > 1:
            self.layout.step(x, y, loss_fn)
        else:
            loss_fn(self.layout.model(x), y).backward()
        self.opt.step()
        self.scheduler.step()
        self.opt.zero_grad()
        self.average.value = 0.9 * self.average.value + dist.get_rank() + 1

    def state(self) -> dict[str, Any]:
        """Return the weights of all ranks, and what else tells whether training went on."""
        mine = {n: whole(p) for n, p in self.layout.model.named_parameters()}
        mine |= {n: b.clone() for n, b in self.layout.model.named_buffers()}
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, mine)
        weights = {n: t for theirs in reversed(every) for n, t in theirs.items()}
        return {
            "weights": weights,
            "lr": self.opt.param_groups[0]["lr"],
            "average": self.average.value,
            # Where it goes on; its number in the journal is each loader's own.
            "loader": {k: v for k, v in self.loader._standing.saved().items() if k != "journal"},
            "draw": float(torch.rand(())),
        }

    def weights(self) -> State:
        """Return the weights of all ranks. Collective."""
        found: State = self.state()["weights"]
        return found

    def end(self) -> None:
        """Let nothing of it be found any more."""
        nbdist.keep(average=None)
        for kind in (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler):
            for living in torch_live.here.live(kind):
                torch_live.here.forget(living)


def _dataset(kind: str) -> TensorDataset:
    random = torch.Generator().manual_seed(7)
    if kind == "conv":
        x, y = models.batch("conv", 0, SAMPLES, torch.float32)
        return TensorDataset(x, y)
    vocabulary, length = (models.V, models.T) if kind == "tied" else (V, T)
    x_BT = torch.randint(vocabulary, (SAMPLES, length), generator=random)
    return TensorDataset(x_BT, (x_BT * 7 + 3) % vocabulary)


def save_and_go_on(folder: str, case: Case, steps: int, more: int) -> dict[str, Any]:
    """Train, save in the midst of a loop, and go on; returns the state at the end."""
    training = Training(case)
    training.train(steps + more, steps, lambda: nbdist.save(folder))
    wait_for_saves()
    found = training.state()
    training.end()
    return found


def leave_and_save(folder: str, case: Case, steps: int, more: int) -> dict[str, Any]:
    """Leave a loop in mid epoch, save, go on; returns the epoch then, and the state at the end."""
    training = Training(case)
    training.train(steps)
    nbdist.save(folder, wait=True)
    epoch = training.loader.epoch
    training.train(more)
    found = training.state() | {"epoch": epoch}
    training.end()
    return found


def restore_and_go_on(folder: str, case: Case, more: int, **how: Any) -> dict[str, Any]:
    """Build the training anew, restore it, and make the steps that were made after the save."""
    training = Training(case, seed=100 + dist.get_rank())
    restored = nbdist.restore(folder, **how)
    epoch = training.loader.epoch
    training.train(more)
    found = training.state() | {"notes": restored.notes, "step": restored.step, "epoch": epoch}
    training.end()
    return found


def save_many(folder: str, case: Case, at: list[int], **how: Any) -> list[str]:
    """Save at these steps, and return the folders there are afterwards."""
    training = Training(case)
    for step, before in zip(at, [0, *at], strict=False):
        training.train(step - before)
        nbdist.save(folder, wait=True, **how)
    training.end()
    wait_for_saves()
    dist.barrier()
    return sorted(path.name for path in Path(folder).iterdir())


def loaders_made_again(folder: str, case: Case) -> dict[str, int]:
    """Save where two loaders of one size stand, make them again the other way round, and restore.

    Returns:
        How many samples each has consumed then, by name; those before live on as "old NAME".
    """
    names: dict[str, Any] = {}
    keep.here.look_in(lambda: names)
    training = Training(case)
    training.train(1)
    data = TensorDataset(torch.arange(40))
    for name in ("train", "val"):
        names[name] = make_loader(data, global_batch=4, seed=3)
    batches = iter(names["train"])
    for _ in range(3):
        next(batches)
    nbdist.save(folder, wait=True)
    names |= {f"old {name}": names[name] for name in ("train", "val")}
    for name in ("val", "train"):
        names[name] = make_loader(data, global_batch=4, seed=3)
    next(batches)
    nbdist.restore(folder)
    found = {name: one.consumed for name, one in names.items()}
    keep.here.look_in(dict)
    training.end()
    return found


def wait_for_saves() -> None:
    """Wait until what was saved is written, and raise what went wrong."""
    from nbdist.engine.checkpoint import save

    save.here.settle()
    if save.here._newest is not None and save.here._newest.error is not None:
        raise save.here._newest.error


def error_of(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Return what a call raises, as text."""
    try:
        call(*args, **kwargs)
    except nbdist.NBDistError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def forget_all() -> None:
    """Have no training on this rank."""
    for name in keep.here.kept():
        nbdist.keep(**{name: None})
    gc.collect()


def save_each(root: str, cases: list[Case], steps: int, more: int) -> None:
    """Save a training in each layout, and beside it its weights then and some steps later."""
    for case in cases:
        training = Training(case, seed=0)
        folder = folder_of(root, case)
        then: State = {}

        def save(training: Training = training, folder: Path = folder, then: State = then) -> None:
            nbdist.save(str(folder), wait=True)
            then.update(training.weights())

        training.train(steps + more, steps, save)
        later = training.weights()
        training.end()
        if dist.get_rank() == 0:
            torch.save((then, later), folder / "weights.pt")


def restore_each(root: str, saved: list[Case], case: Case, more: int) -> list[tuple[bool, float]]:
    """Restore what was saved in each layout into one; go on.

    Returns:
        Whether the weights are those that were saved, to the bit; how far those after more steps
        lie from those of the training that had saved.
    """
    found = []
    for other in saved:
        folder = folder_of(root, other)
        then, later = torch.load(folder / "weights.pt")
        training = Training(case, seed=1 + dist.get_rank())
        nbdist.restore(str(folder))
        restored = training.weights()
        training.train(more)
        found.append((_apart(then, restored) == 0.0, _apart(later, training.weights())))
        training.end()
    return found


def floor(root: str, saved: Case, more: int, samples: int) -> float:
    """Return what rounding does to restored trainings whose weights are moved a little. 1 rank."""
    _, later = torch.load(folder_of(root, saved) / "weights.pt")
    apart = []
    for sample in range(1, samples + 1):
        training = Training(Case(1, "ddp", dtype=saved.dtype))
        nbdist.restore(str(folder_of(root, saved)))
        move(training.layout.model, sample)
        training.train(more)
        apart.append(_apart(later, training.weights()))
        training.end()
    return max(apart)


def _apart(a: State, b: State) -> float:
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def folder_of(root: str, case: Case) -> Path:
    """Return where a case's checkpoint lies."""
    return Path(root) / f"{case.ranks} {case.way}".replace('"', "")


# ---- What follows the steps ---------------------------------------------------------------------


class Holder:
    """An object that holds an optimizer out of sight."""

    opt: torch.optim.Optimizer


Averaged = torch.optim.swa_utils.AveragedModel


class Shadow:
    """An average by hand, of parameters that may be cut over ranks."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = [p.detach().clone() for p in model.parameters()]

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        for mine, its in zip(self.shadow, model.parameters(), strict=True):
            mine.lerp_(its.detach(), 0.1)

    def parameters(self) -> list[Tensor]:
        return self.shadow

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": list(self.shadow)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for mine, its in zip(self.shadow, state["shadow"], strict=True):
            mine.copy_(its)


class Followed:
    """A training whose schedulers and averages are found by nothing but their names."""

    def __init__(self, layout: str, average: type[Any] | None = None) -> None:
        recovery.install()
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.model = parallelize(net, layout).model
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        rates = torch.optim.lr_scheduler
        self.warm = rates.LinearLR(self.opt, 0.1, 1.0, 4)
        self.cosine = rates.CosineAnnealingLR(self.opt, 20)
        self.sequence = rates.SequentialLR(self.opt, [self.warm, self.cosine], [4])
        self.plateau = rates.ReduceLROnPlateau(self.opt, factor=0.5, patience=1)
        self.own = Average()
        self.ema = average(self.model) if average else None

    def train(self, begin: int, end: int) -> list[float]:
        """Make steps, and return the rate of each."""
        found = []
        for step in range(begin, end):
            self.model(torch.full((2, 4), step / 10)).pow(2).sum().backward()
            self.opt.step()
            self.opt.zero_grad()
            self.sequence.step()
            self.plateau.step(1.0)
            self.own.value += step
            if self.ema is not None:
                self.ema.update_parameters(self.model)
            found.append(float(self.opt.param_groups[0]["lr"]))
        return found

    def end(self) -> list[Any]:
        """Return what the averages are, and let nothing of it be found any more."""
        ema = [whole(p).tolist() for p in self.ema.parameters()] if self.ema else []
        Training.end(self)  # type: ignore[arg-type]
        return [self.own.value, ema]


def followers_saved(folder: str, layout: str, average: type[Any]) -> list[Any]:
    """Save what follows the steps in the midst of a training, and go on: rates and averages."""
    t = Followed(layout, average)
    t.train(0, 6)
    nbdist.save(folder, wait=True)
    return [t.train(6, 14), *t.end()]


def followers_restored(
    folder: str, layout: str, average: type[Any] | None = None, only: list[str] | None = None
) -> Any:
    """Restore it into new objects, and go on."""
    t = Followed(layout, average)
    try:
        restored = nbdist.restore(folder, only=only)
    except nbdist.NBDistError as error:
        t.end()
        return str(error)
    assert restored is not None
    return [t.train(6, 14), *t.end()]


def restored_from_old_format(folder: str) -> list[Any]:
    """Save as before followers had names; restore, and return rates and what was said."""
    t = Followed("ddp")
    newer = torch.optim.lr_scheduler.CosineAnnealingLR(t.opt, 7)
    t.train(0, 6)
    native = rest.facts_of

    def facts_of(training: Any, of_moment: Any) -> Any:
        told = native(training, of_moment)
        made = torch_live.here.live(torch.optim.lr_scheduler.LRScheduler)
        states = [(type(one).__name__, rest.frozen(one.state_dict())) for one in made]
        del told["followers"]
        return told | {"schedulers": states, "scalers": []}

    rest.facts_of = facts_of
    try:
        nbdist.save(folder, wait=True)
    finally:
        rest.facts_of = native
    before = [one.state_dict() for one in (t.warm, t.cosine, newer)]
    t.end()
    t = Followed("ddp")
    newer = torch.optim.lr_scheduler.CosineAnnealingLR(t.opt, 7)
    said = str(nbdist.restore(folder))
    after = [one.state_dict() for one in (t.warm, t.cosine, newer)]
    t.end()
    return [before, after, said]


def saved_beside_a_failed_cell() -> dict[str, str]:
    """Save where a traceback, a name's scheduler and `Out` hold other models; what is saved."""
    recovery.install()

    def made(kind: type[nn.Module], *sizes: int) -> torch.optim.Optimizer:
        model = parallelize(kind(*sizes), "ddp").model
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        vars(opt)["model"] = model  # which lives as long
        return opt

    def fail() -> None:
        opt = made(nn.Bilinear, 2, 2, 2)
        raise ValueError(f"in the midst of {type(opt).__name__}")

    try:
        fail()
    except ValueError as error:
        sys.last_value = error
    _names: dict[str, Any] = {"Out": {1: made(nn.Conv1d, 2, 2, 1)}, "held": {"trainer": Holder()}}
    _names["held"]["trainer"].opt = made(nn.Linear, 2, 2)
    _names["rate"] = torch.optim.lr_scheduler.StepLR(made(nn.Conv2d, 2, 2, 1), 1)
    keep.here.look_in(lambda: _names)
    try:
        return dict(training_state.layouts(training_state.find()))
    finally:
        keep.here.look_in(dict)
        del sys.last_value
        Training.end(_names["rate"])


# ---- Several of a class -------------------------------------------------------------------------


def build_nets(names: dict[str, Any], order: str, layout: str = "ddp") -> None:
    """Build small models of one class in an order, each with an optimizer, as cells name them."""
    recovery.install()
    keep.here.look_in(lambda: names)
    for name in order:
        torch.manual_seed(ord(name))
        net = parallelize(nn.Linear(4, 4), layout).model
        opt = torch.optim.SGD(net.parameters(), lr=ord(name) / 1000, momentum=0.9)
        rate = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
        names |= {name: net, f"opt_{name}": opt, f"rate_{name}": rate}


def step_nets(names: dict[str, Any], which: str) -> None:
    """Make a step of each of these."""
    for name in which:
        names[name](torch.full((2, 4), ord(name) / 100)).pow(2).sum().backward()
        names[f"opt_{name}"].step()
        names[f"opt_{name}"].zero_grad()
        names[f"rate_{name}"].step()


def states_of_nets(names: dict[str, Any], which: str) -> dict[str, Any]:
    """Return of each of these weights, momentum, rate and steps."""
    found = {}
    for name in which:
        opt = names[f"opt_{name}"]
        moved = [whole(s["momentum_buffer"]).tolist() for s in opt.state.values()]
        weights = [whole(p).tolist() for p in names[name].parameters()]
        steps = step_state.here().steps
        made = steps[opt].whole if opt in steps else 0
        rate = names[f"rate_{name}"].last_epoch, opt.param_groups[0]["lr"]
        found[name] = weights, moved, made, rate
    return found


def end_nets(names: dict[str, Any]) -> None:
    """Let nothing of them be found any more."""
    keep.here.look_in(dict)
    names.clear()
    for living in torch_live.here.live(torch.optim.Optimizer):
        torch_live.here.forget(living)
    gc.collect()


def nets_saved(folder: str, order: str, layout: str, names_told: bool = True) -> dict[str, Any]:
    """Build, train unequally and save; without names as older versions have."""
    _names: dict[str, Any] = {}
    native = rest.facts_of

    def facts_of(training: Any, of_moment: Any) -> Any:
        told = native(training, of_moment)
        return told if names_told else {what: told[what] for what in told if what != "called"}

    rest.facts_of = facts_of
    try:
        build_nets(_names, order, layout)
        for end in range(len(order)):
            step_nets(_names, order[: end + 1])
        nbdist.save(folder, wait=True)
        return states_of_nets(_names, order)
    finally:
        rest.facts_of = native
        end_nets(_names)


def nets_restored(
    folder: str, order: str, layout: str, renamed: dict[str, str] | None = None, how: Any = None
) -> tuple[dict[str, Any], str]:
    """Build anew in another order, restore; returns the states by name, and what was said."""
    _names: dict[str, Any] = {}
    try:
        build_nets(_names, order, layout)
        for old, new in (renamed or {}).items():
            _names[new] = _names.pop(old)
        said = str(nbdist.restore(folder, **(how or {})))
        return states_of_nets(_names, order), said
    except nbdist.NBDistError as error:
        return {}, f"{type(error).__name__}: {error}"
    finally:
        end_nets(_names)


def parts_asked_for(folder: str) -> dict[str, str]:
    """Ask for parts of a training, some of them wrongly; returns what was said of each call."""
    _names: dict[str, Any] = {}
    said = {}

    def ask(name: str, call: Callable[[], Any]) -> None:
        try:
            call()
            said[name] = ""
        except nbdist.NBDistError as error:
            said[name] = f"{type(error).__name__}: {error}"

    try:
        build_nets(_names, "ab")
        step_nets(_names, "ab")
        teacher = _names["teacher"] = nn.Linear(4, 4)
        asked: list[Any] = [_names["a"], teacher]
        other = "ab"[dist.get_rank()]
        ask("untrained", lambda: nbdist.save(folder, what=asked, wait=True))
        ask("its name", lambda: nbdist.save(folder, what=["a", "teacher"], wait=True))
        ask("no model", lambda: nbdist.save(folder, what=["a", "rate_a"], wait=True))
        ask("others", lambda: nbdist.save(folder, what=[_names[other]], wait=True))
        some = None if other == "a" else ["b"]
        ask("all or one", lambda: nbdist.save(folder, what=some, wait=True))
        keep.keep(teacher=teacher)
        ask("kept", lambda: nbdist.save(folder, what=asked, wait=True))
        ask("restored", lambda: nbdist.restore(folder, only=[_names[other]]))
        return said
    finally:
        keep.keep(teacher=None)
        end_nets(_names)


def cells_saved(folder: str, layout: str) -> dict[str, Any]:
    """Train two models in cells of their own, and save from the second and from a third cell.

    Returns:
        The models' states, and what the second cell says of its checkpoint.
    """
    _names: dict[str, Any] = {}
    try:
        step_state.begin_cell()
        build_nets(_names, "ac", layout)
        step_nets(_names, "ac")
        step_state.begin_cell()
        save.here.cell_began(CellStart(1, (0, 1), 1))
        build_nets(_names, "b", layout)
        step_nets(_names, "b")
        nbdist.save(f"{folder}/second", wait=True)
        said = " ".join(save.here.cell_ended(EndedCell(1, "", has_succeeded=True)))
        nbdist.save(f"{folder}/asked", what=["a", _names["opt_b"]], wait=True)
        step_state.begin_cell()
        nbdist.save(f"{folder}/all", wait=True)
        step_nets(_names, "a")  # its cell made another one as well
        nbdist.save(f"{folder}/first", wait=True)
        return {"states": states_of_nets(_names, "abc"), "said": said}
    finally:
        end_nets(_names)
