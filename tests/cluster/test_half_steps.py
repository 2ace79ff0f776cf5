"""A fault leaves all that follows a step where the step is, or says what is not.

From a fresh training each: a fault at one place of the step, `retry`, and what comes out compared
with the same training undisturbed. It is equal, or the error named what was left half done, and it
is equal when that was done.
"""

import itertools
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import nbdist
from nbdist import RankError, Session
from nbdist.client.cells import interrupts
from nbdist.shared.errors import Interrupted
from tests.cluster.conftest import SharedCluster
from tests.covering import covering

SETUP = """
import os, pathlib, random, time
import numpy as np
import torch.nn.functional as F
from torch.optim.lr_scheduler import *
g = torch.Generator().manual_seed(0)
X = torch.randn(96, 8, generator=g)
data = torch.utils.data.TensorDataset(X, X.sum(1, keepdim=True))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
layout = nbdist.parallelize(model, {layout!r})
opt = layout.optimizer(torch.optim.AdamW, {trained}lr=1e-2)
train = nbdist.loader(data, global_batch=16, seed=3)
n = 0
struck = pathlib.Path({folder!r})
def local(t): return t.to_local() if hasattr(t, "to_local") else t
def fail(place):
    mine = struck / f"rank {{rank}}"
    if place == {place!r} and n == {at} and rank in {ranks} and not mine.exists():
        mine.touch()
        {strike}
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
class Noisy(torch.utils.data.Dataset):
    "Draws from all generators that people use."
    def __len__(self): return len(X)
    def __getitem__(self, i):
        drawn = random.random() + np.random.rand() + torch.rand(8)
        return X[i] + 0.1 * drawn, X[i].sum(0, keepdim=True)
{make}
"""
STRIKE = {
    "raise": "raise ValueError('bad metric')",
    "kill": "os.kill(os.getpid(), 9)",
    "interrupt": "while True: time.sleep(0.01)",
}
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
([local(p).detach().double().sum().item() for p in model.parameters()],
 n, opt.param_groups[0]["lr"], {told})
"""


@dataclass(frozen=True)
class Kind:
    """What follows the steps: how it is made, stepped, and what it tells.

    `at`: the batch of a fault after the backward, and `later` of one after the step. `saved`: what
    a checkpoint holds that is saved before, for half steps for which there is no other way.
    """

    make: str
    after: str = "pass"
    told: str = "0"
    step: str = "opt.step()"
    scale: str = ""
    close: str = ""
    epoch: str = "pass"
    trained: str = ""
    at: int = 5
    later: int = 5
    saved: str = ""
    places: tuple[str, ...] = ("backward", "step", "after", "log")


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
        "sched = ExponentialLR(opt, 0.5)",
        told="sched.last_epoch",
        epoch="sched.step()",
        at=6,
        later=6,
    ),
    "one cycle": Kind(
        "opt = layout.optimizer(torch.optim.SGD, lr=1e-2, momentum=0.9)\n"
        "sched = OneCycleLR(opt, 0.1, 40)",
        "sched.step()",
        "(sched.last_epoch, opt.param_groups[0]['momentum'])",
    ),
    "own schedule": Kind("sched = Warm()", "sched.step()", "sched.made"),
    "in a dict": Kind(
        "import collections\ncounts = collections.Counter(made=0)",
        "counts['made'] += 1",
        "counts['made']",
    ),
    "by hand": Kind("", "[g.update(lr=g['lr'] * 0.9) for g in opt.param_groups]"),
    "by hand before": Kind(
        "",
        step="[g.update(lr=g['lr'] * 0.9) for g in opt.param_groups]; fail('between'); opt.step()",
        places=("between", "step"),
    ),
    "by hand at times": Kind(
        "",
        "[g.update(lr=g['lr'] * 0.9) for g in opt.param_groups if n in (1, 3, 9)]",
        places=("step", "after"),
    ),
    "by hand beside": Kind(
        "sched = StepLR(opt, 1, 0.9)",
        "sched.step(); fail('between'); [g.update(lr=g['lr'] * 0.8) for g in opt.param_groups]",
        "(sched.last_epoch, opt.param_groups[0]['lr'])",
        places=("step", "between", "after"),
    ),
    "decay by hand beside": Kind(
        "sched = StepLR(opt, 1, 0.9)",
        "sched.step(); fail('between'); "
        "[g.update(weight_decay=g['weight_decay'] * 0.8) for g in opt.param_groups]",
        "(sched.last_epoch, opt.param_groups[0]['weight_decay'])",
        places=("step", "between", "after"),
    ),
    "betas by hand": Kind(
        "", "[g.update(betas=(g['betas'][0] * 0.9, 0.999)) for g in opt.param_groups]"
    ),
    "weights": Kind("", "weights = [local(p.data).mul_(0.99) for p in model.parameters()]"),
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
    "accumulated": Kind("", step="if n % 4 == 0: opt.step()\n        else: continue", later=12),
    "held": Kind(
        "class Trainer: pass\ntrainer = Trainer()\n"
        "trainer.parts = {'sched': [SequentialLR(opt, [LinearLR(opt), StepLR(opt, 2)], [3])]}\n"
        "trainer.count = 0",
        "trainer.parts['sched'][0].step(); trainer.count += 1",
        "(trainer.parts['sched'][0].last_epoch, trainer.count)",
    ),
    "accumulated scaler": Kind(
        "scaler = torch.amp.GradScaler('cpu', init_scale=2.0**10, growth_interval=2)",
        "scaler.update()",
        "scaler.get_scale()",
        step="if n % 4 == 0: scaler.step(opt)\n        else: continue",
        scale="scaler.scale(",
        close=" / 4)",
        later=8,
    ),
    "accumulated schedule": Kind(
        "sched = CosineAnnealingLR(opt, 10)",
        "sched.step()",
        "sched.last_epoch",
        step="if n % 2 == 0: opt.step()\n        else: continue",
        later=6,
    ),
    "workers": Kind("train = nbdist.loader(Noisy(), global_batch=16, seed=3, num_workers=2)"),
    "augmented": Kind(
        "train = nbdist.loader(Noisy(), global_batch=16, seed=3)\n"
        "random.seed(rank); np.random.seed(rank)"
    ),
    "two optimizers": Kind(
        "opt2 = layout.optimizer(torch.optim.AdamW, model[2].parameters(), lr=3e-3)",
        "opt2.zero_grad()",
        step="opt.step(); fail('between'); opt2.step()",
        trained="model[0].parameters(), ",
        saved="model",
        places=("backward", "between", "step", "after", "log"),
    ),
    "two models": Kind(
        "other = torch.nn.Linear(8, 1)\nbeside = nbdist.parallelize(other, layout.name)\n"
        "opt2 = beside.optimizer(torch.optim.AdamW, lr=3e-3)",
        "F.mse_loss(other(x), model(x).detach()).backward(); fail('between'); "
        "opt2.step(); opt2.zero_grad()",
        "[local(p).detach().double().sum().item() for p in other.parameters()]",
        saved="model, other",
        places=("backward", "step", "between", "after", "log"),
    ),
    "several": Kind(
        "class Trainer: pass\ntrainer = Trainer(); trainer.seen = 0; ema = Shadow(model)\n"
        "sched = SequentialLR(opt, [LinearLR(opt), ExponentialLR(opt, 0.9)], [4])\n"
        "scaler = torch.amp.GradScaler('cpu', init_scale=2.0**10, growth_interval=3)",
        "scaler.update(); fail('between'); sched.step(); ema.update(model); trainer.seen += 1",
        "(sched.last_epoch, scaler.get_scale(), trainer.seen,"
        " [p.double().sum().item() for p in ema.kept['weights'].values()])",
        step="scaler.step(opt)",
        scale="scaler.scale(",
        close=")",
        places=("backward", "step", "between", "after", "log"),
    ),
}
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
    session: Session,
    kind: Kind,
    layout: str,
    place: str = "",
    who: str = "()",
    folder: Path = Path(),
    fault: str = "raise",
) -> None:
    at = kind.at if place == "backward" else kind.later
    code = SETUP.format(
        layout=layout,
        place=place,
        ranks=who,
        at=at,
        make=kind.make,
        trained=kind.trained,
        folder=str(folder),
        strike=STRIKE[fault],
    )
    save = f"\nnbdist.save('before', what=[{kind.saved}])" if kind.saved else ""
    session.run(code + save, track=False)


@contextmanager
def interrupted_once_struck(folder: Path, who: str) -> Iterator[None]:
    """Interrupt the cell as `■` does, when these ranks are where the fault shall be."""
    over = threading.Event()

    def interrupt() -> None:
        while not all((folder / f"rank {rank}").exists() for rank in eval(who)):
            if over.wait(0.01):
                return
        [cell] = interrupts.here.entered
        cell.ask()

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def fail_training(session: Session, kind: Kind, fault: str, who: str, folder: Path) -> str:
    """Run the loop into its fault, and return what is said."""
    if fault == "interrupt":
        with interrupted_once_struck(folder, who), pytest.raises(Interrupted) as stopped:
            run_training(session, kind)
        return str(stopped.value)
    with pytest.raises(RankError) as failed:
        run_training(session, kind)
    assert ("bad metric" if fault == "raise" else "SIGKILL") in str(failed.value)
    return str(failed.value)


def do_as_said(session: Session, kind: Kind, said: str) -> None:
    """Do what an error advises where a step is half done: the rest of it, or to restore."""
    done: list[str] = []
    for line in said.splitlines():
        named = re.search(
            r"is half done on [^:]+: (.+) ha(?:s|ve) not followed it|Whether (.+) had followed",
            line,
        )
        if named is None:
            continue
        if "else nbdist.restore() a checkpoint" in line:
            session.run("nbdist.restore('before'); n = 0", track=False)
            return
        paths = re.split(r", | and ", re.sub(r" \(\w+\)", "", named[1] or named[2]))
        names = {re.split(r"[.[]", path)[0] for path in paths}
        if "the change of the weights after opt" in names:
            names.add("weights")
        ranks = re.search(r"distributed -r ([\d,]+)", line)
        rest = [
            part
            for part in kind.after.split("; ")
            if any(f"{name}." in part or re.match(rf"{name}( = |\[)", part) for name in names)
            if "fail(" not in part
            if part not in done
        ]
        done += rest
        session.run("; ".join(rest), ranks=ranks[1] if ranks else "all", track=False)


Case = tuple[str, str, str, str, str]
SHARDS_OF_ITS_OWN = (("shadow", "zero3"), ("several", "zero3"))


def every_case() -> Iterator[Case]:
    """Return all cases: a kind, a place, a layout, who is struck, and by what."""
    for name, kind in KINDS.items():
        for place, layout, who, fault in itertools.product(kind.places, LAYOUTS, WHO, STRIKE):
            if (name, layout) == ("averaged", "zero3"):
                continue  # torch copies no sharded model
            if fault == "kill" and (who == WHO[2] or name == "augmented"):
                continue  # all is lost; of a new process the random numbers are, which is said
            if needs_peers(layout, fault) and (name, layout) in SHARDS_OF_ITS_OWN:
                continue  # it cannot be given to a new process, and is a placeholder there
            yield name, place, layout, who, fault


def cases(*, peers: bool) -> list[object]:
    """Return all cases with or without `needs_peers`.

    Those of `make test` meet each value, and each place with all faults, layouts and ranks. Each
    kind is struck where what follows its step is missing: on one rank, the other or both, in turn.
    """
    every, kinds = list(every_case()), list(KINDS)
    alone = [case for case in every if not needs_peers(case[2], case[4])]
    alone.sort(key=lambda c: (c[1] != "step", c[3] != WHO[kinds.index(c[0]) % len(WHO)]))
    chosen = set(covering(alone, (7, 5)))
    slow = (pytest.mark.slow,)
    return [
        pytest.param(*case, marks=() if case in chosen else slow)
        for case in every
        if needs_peers(case[2], case[4]) == peers
    ]


def needs_peers(layout: str, fault: str) -> bool:
    """Return whether a shard goes with its rank, but where another rank's memory keeps it."""
    return fault == "kill" and layout != "ddp"


_right: dict[tuple[str, str], object] = {}


def right(session: Session, name: str, layout: str) -> object:
    """Return what the training comes to undisturbed."""
    if (name, layout) not in _right:
        set_up(session, KINDS[name], layout)
        _right[name, layout] = run_training(session, KINDS[name])
    return _right[name, layout]


def require_right_or_named(session: Session, case: Case, folder: Path) -> None:
    """Check that a training comes to what it does undisturbed, when done what its error names."""
    name, place, layout, who, fault = case
    kind, wanted = KINDS[name], right(session, name, layout)
    set_up(session, kind, layout, place, who, folder, fault)
    said = fail_training(session, kind, fault, who, folder)
    do_as_said(session, kind, said)
    session.retry()

    told = session.run(TOLD.format(told=kind.told), track=False).value_list
    assert told == wanted, said


@pytest.mark.parametrize(("name", "place", "layout", "who", "fault"), cases(peers=False))
def test_all_that_follows_a_step_is_right_after_a_fault_or_named(
    session: Session, name: str, place: str, layout: str, who: str, fault: str, tmp_path: Path
) -> None:
    require_right_or_named(session, (name, place, layout, who, fault), tmp_path)


def require_right_from_the_first(
    session: Session, name: str, place: str, who: str, fault: str, folder: Path
) -> None:
    """The same of a training's first step, before which none shows what follows one."""
    kind, wanted = replace(KINDS[name], at=1, later=1), right(session, name, "ddp")
    set_up(session, kind, "ddp", place, who, folder, fault)
    said = fail_training(session, kind, fault, who, folder)
    assert kind.epoch == "pass" or "is half done" not in said, said
    do_as_said(session, kind, said)
    session.retry()
    assert session.run(TOLD.format(told=kind.told), track=False).value_list == wanted, said


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("place", ["backward", "step", "after"])
@pytest.mark.parametrize(
    "name", ["cosine", "an epoch", "own schedule", "by hand", "shadow", "held", "scaler"]
)
def test_the_first_step_of_all_is_right_after_a_fault_or_named(
    session: Session, name: str, place: str, who: str, tmp_path: Path
) -> None:
    require_right_from_the_first(session, name, place, who, "raise", tmp_path)


@pytest.mark.parametrize("fault", ["raise", "kill"])
@pytest.mark.parametrize("place", ["backward", "after"])
def test_a_list_that_the_first_step_makes_lacks_nothing(
    session: Session, place: str, fault: str, tmp_path: Path
) -> None:
    require_right_from_the_first(session, "weights", place, "(0,)", fault, tmp_path)


@pytest.mark.parametrize("layout", ["zero1", "zero3"])
def test_steps_of_an_earlier_cell_that_a_fault_undoes_are_named_and_can_be_made_again(
    session: Session, layout: str, tmp_path: Path
) -> None:
    kind = KINDS["cosine"]
    told = TOLD.format(told=kind.told)
    loop = """
for x, y in train:
    F.mse_loss(model(x), y).backward()
    fail("backward")
    opt.step(); sched.step(); opt.zero_grad(); n += 1
"""
    set_up(session, kind, layout)
    session.run(loop, track=False)
    session.run(loop, track=False)
    wanted = session.run(told, track=False).value_list

    set_up(session, replace(kind, at=6), layout, "backward", "(0,)", tmp_path)
    session.run(loop, track=False)
    with pytest.raises(RankError, match="bad metric") as failed:
        session.run(loop, track=False)
    assert "an earlier cell had made 5. A loop up to an epoch" in str(failed.value)
    session.run(loop, track=False, go_on=True)
    session.run(loop, track=False)
    assert session.run(told, track=False).value_list == wanted


def test_a_cell_with_retries_does_not_go_on_by_itself_after_half_a_step(
    session: Session, tmp_path: Path
) -> None:
    kind = KINDS["cosine"]
    set_up(session, kind, "ddp", "step", "(0, 1)", tmp_path)
    with pytest.raises(RankError, match="bad metric") as failed:
        run_training(session, kind, retries=2)
    assert "a step is half done" in str(failed.value)

    # Where one rank did the rest of it, the cell goes on.
    (tmp_path / "one").mkdir()
    set_up(session, kind, "ddp", "step", "(0,)", tmp_path / "one")
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
    session: Session, layout: str, tmp_path: Path
) -> None:
    kind = Kind(ODD, "sched.step(); raising.step(); locked.step()", "sched.last_epoch")
    set_up(session, kind, layout)
    right = run_training(session, kind)
    set_up(session, kind, layout, "backward", "(1,)", tmp_path)
    with pytest.raises(RankError, match="bad metric") as failed:
        run_training(session, kind)
    if layout == "ddp":
        assert "locked (Odd) and raising (Odd) have not followed it" in str(failed.value)
    session.retry()
    assert session.run(TOLD.format(told=kind.told), track=False).value_list == right


def test_what_lies_beyond_the_search_is_said_once(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    many = "held = [torch.optim.swa_utils.AveragedModel(torch.nn.Linear(1, 1)) for _ in range(65)]"
    set_up(session, Kind(many), "ddp")
    step = "F.mse_loss(model(X), X.sum(1, keepdim=True)).backward(); opt.step(); opt.zero_grad()"
    for _ in range(2):
        session.run(f"for _ in range(3):\n    {step}", track=False, show=True)
    assert capsys.readouterr().out.count("held holds 65 items, of which 64 are searched") == 1


@pytest.fixture(scope="module")
def with_peers(
    cluster: SharedCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Session]:
    """A session in which ranks keep each other's shards; a kernel has one, so the other ends."""
    cluster.stop()
    _right.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("peers"))
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
        with nbdist.start(n=2, device="cpu", peer_snapshots=2) as session:
            yield session


# Last in the module, for its session takes the place of the shared one.
@pytest.mark.slow
def test_an_average_of_shards_that_died_is_back_when_built_again_and_restored(
    with_peers: Session, tmp_path: Path
) -> None:
    make = (
        "class Kept(Shadow):\n"
        "    def state_dict(self): return self.kept\n"
        "    def load_state_dict(self, state): self.kept = state\n"
        "ema = Kept(model)"
    )
    saved = str(tmp_path / "saved")
    after = f"ema.update(model); n == 3 and nbdist.save({saved!r}, wait=True)"
    kind = replace(KINDS["shadow"], make=make, after=after)
    set_up(with_peers, kind, "zero3")
    wanted = run_training(with_peers, kind)
    set_up(with_peers, kind, "zero3", "after", "(1,)", tmp_path, "kill")

    said = fail_training(with_peers, kind, "kill", "(1,)", tmp_path)

    assert "ema that rank 1 held are lost: build it again; nbdist.restore() then brings" in said
    with_peers.run("ema = Kept(model)", track=False)
    with_peers.run(f"nbdist.restore({saved!r}); n = 3", track=False)
    with_peers.retry()
    assert with_peers.run(TOLD.format(told=kind.told), track=False).value_list == wanted


@pytest.mark.parametrize(("name", "place", "layout", "who", "fault"), cases(peers=True))
def test_shards_of_a_killed_rank_are_right_or_named_where_a_peer_keeps_them(
    with_peers: Session, name: str, place: str, layout: str, who: str, fault: str, tmp_path: Path
) -> None:
    require_right_or_named(with_peers, (name, place, layout, who, fault), tmp_path)
