"""`--keep`: steps that were not left out run again, bit for bit, and nothing is changed by it."""

import random
from dataclasses import asdict, dataclass
from typing import Any, Self

import pytest

import nbdist
from nbdist import Session
from nbdist.client.cells.replays import Replayed
from tests.cluster.conftest import LONGEST_S, Kernel

# A loop of `steps` steps, each of `parts` micro-batches of 8 samples over both ranks. `between`
# runs between backward and the optimizer, `after` behind it. The loop itself notes its losses.
TRAIN = """
from torch import nn
from torch.nn import functional as F
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.drop = nn.Dropout(dropout)
    def forward(self, x):
        return x + self.drop(self.down(torch.relu(self.up(x))))
torch.manual_seed(0)
middle = [nn.BatchNorm1d(8)] if norm else []
model = nn.Sequential(Block(), *middle, Block())
more = {
    "tp=2": [nbdist.TensorParallel(
        example=torch.ones(2, 8), plan={"*.up": "column", "*.down": "row"})],
    "pp=2": [nbdist.Pipeline(example=torch.ones(2, 8))],
}
layout = nbdist.parallelize(model, text, *more.get(text, []))
torch.manual_seed(0 if text == "tp=2" else rank)
kind, options = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.01}),
}[optimizer_name]
optimizer = layout.optimizer(kind, **options)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
size = 8 * steps * parts
draw = torch.Generator().manual_seed(1)
x = torch.randn(size, 8, generator=draw)
y = torch.randn(size, 8, generator=draw)
if bad is not None:
    x[bad, 0] = float("nan")
data = torch.utils.data.TensorDataset(x, y)
loader = nbdist.loader(data, global_batch=8, shuffle=bad is None)
def loss_fn(out, y):
    return F.mse_loss(out, y) / parts
losses, step, batches = [], 0, iter(loader)
def train(steps):
    global step
    for _ in range(steps):
        step += 1
        found = []
        for part in layout.accumulate(parts):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
                loss = layout.step(*next(batches), loss_fn)
            found.append(None if loss is None else loss.item())
        losses.append(found)
        exec(between)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        exec(after)
train(steps - 2)
"""
STATE = """
states = [v for s in getattr(optimizer, "optim", optimizer).state.values() for v in s.values()]
tensors = [*model.parameters(), *model.buffers(), *(v for v in states if torch.is_tensor(v))]
held = [getattr(t, "_local_tensor", t).detach().flatten().tolist() for t in tensors]
modes = [module.training for module in model.modules()]
hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
gradients = [p.grad is None for p in model.parameters()]
import random, numpy
drawn = [random.getstate()[1][:8], numpy.random.get_state()[1][:8].tolist()]
place = [loader.epoch, optimizer.param_groups[0]["lr"], schedule.last_epoch]
repr([held, modes, hooks, gradients, torch.get_rng_state().tolist(), drawn, place])
"""


@dataclass(frozen=True)
class Drawn:
    """A training, and the step of it that is run again."""

    text: str
    dropout: float
    norm: bool
    optimizer_name: str
    parts: int
    autocasts: bool
    between: str
    steps: int
    step: int

    @classmethod
    def of(cls, seed: int) -> Self:
        draw = random.Random(seed)
        steps = draw.randint(5, 60)
        newest = steps - 2
        clip = draw.choice(["layout.clip_grad_norm_(0.5)", "", ""])
        # torch's own clipping, of all parameters; not over shards of several axes.
        own = "nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=False)"
        return cls(
            ("ddp", "zero3", "tp=2", "zero1", "zero2")[seed % 5],
            draw.choice([0.0, 0.25]),
            draw.random() < 0.5,
            draw.choice(["AdamW", "SGD", "Adagrad"]),
            draw.randint(1, 3),
            draw.random() < 0.3,
            draw.choice([clip, clip, own]),
            steps,
            draw.randint(max(1, newest - 19), newest),
        )


QUICK = (10,)  # ddp, with dropout


def train(session: Session, **params: object) -> None:
    given: dict[str, object] = {
        "text": "ddp",
        "dropout": 0.25,
        "norm": True,
        "optimizer_name": "AdamW",
        "parts": 1,
        "autocasts": False,
        "between": "",
        "after": "",
        "steps": 10,
        "bad": None,
    }
    session.run(TRAIN, params=given | params, keep=True, timeout_s=4 * LONGEST_S)


def is_proven(found: Replayed) -> bool:
    return found.is_proven and all(one.norms is None for one in found.proofs.values())


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in range(50)]
)
def test_a_drawn_training_runs_again_bit_for_bit_and_goes_on_as_if_it_had_not(
    session: Session, seed: int
) -> None:
    drawn = Drawn.of(seed)
    params = asdict(drawn)
    step = params.pop("step")
    states, losses = [], []
    for looks in (False, True):
        train(session, **params)
        losses.append(session.run("losses").value_list)
        before = session.run(STATE).value_list
        if looks:
            found = session.replay(step)
            assert is_proven(found), f"{drawn}\n{found}"
            assert session.run(STATE).value_list == before
            for rank, one in found.ranks.items():
                made = losses[-1][rank][step - 1]
                assert one.loss == pytest.approx(sum(made) / len(made), rel=1e-12)
        states.append(session.run("train(2)\n" + STATE, timeout_s=LONGEST_S).value_list)
    assert losses[0] == losses[1]
    assert states[0] == states[1]


@pytest.mark.slow
def test_steps_are_kept_since_the_older_of_two_starts(session: Session) -> None:
    train(session, steps=60, norm=False)
    with pytest.raises(nbdist.UsageError, match="Step 24 is not kept") as error:
        session.replay(24)
    assert "25-58" in error.value.why
    found = session.replay(25)
    assert [one.proof and one.proof.steps for one in found.ranks.values()] == [1, 1]
    assert is_proven(session.replay(48))


def test_what_a_loop_does_to_gradients_is_said_to_be_missing(session: Session) -> None:
    halve = "[p.grad.mul_(0.5) for p in model.parameters() if step == 4]"
    train(session, between=halve)
    assert "losses of all 4 steps are equal bit for bit. In step 4" in str(session.replay(4))
    found = session.replay(7)
    assert found.ranks[0].proof is not None
    assert found.ranks[0].proof.loss is not None
    assert (found.ranks[0].proof.loss[0], found.ranks[0].proof.norms) == (5, 4)
    assert "with weights that are not those it had" in str(found)


def test_what_a_loop_does_to_weights_is_said_to_be_missing(session: Session) -> None:
    train(session, after="[p.detach().clamp_(-0.2, 0.2) for p in model.parameters()]")
    found = session.replay(7)
    assert "from step 2 on losses are no longer those of the training" in str(found)
    assert "Gradients were the same until then" in str(found)


@pytest.mark.slow
def test_on_many_ranks_steps_are_made_again_from_where_ddp_sums_as_it_does_now(
    session: Session,
) -> None:
    session.scale(4)
    try:
        train(session, between="layout.clip_grad_norm_(0.5)")
        first, later = session.replay(1), session.replay(7)
        assert (first.has_weights, first.is_proven) == (True, False)
        assert "DDP has summed its gradients in another order since" in str(first)
        assert is_proven(later)
        assert [one.begins for one in later.proofs.values()] == [2] * 4
    finally:
        session.scale(2)


@pytest.mark.slow
def test_a_step_that_was_left_out_lies_among_those_that_are_made_again(session: Session) -> None:
    train(session, bad=35, steps=12)
    left_out = session.replay()
    assert (left_out.step, left_out.is_left_out) == (5, True)
    assert left_out.ranks[0].forwards[0].rows == (3,)
    found = session.replay(9)
    assert is_proven(found)
    assert found.ranks[0].proof is not None
    assert found.ranks[0].proof.steps == 8, "it has changed nothing, and is not made again"


@pytest.mark.slow
def test_of_a_pipeline_the_forward_does_not_run_and_it_is_said_why(session: Session) -> None:
    train(session, text="pp=2", norm=False, parts=1)
    found = session.replay(5)
    assert not found.ran
    assert "a pipeline's forward is not run again" in str(found)
    train(session, text="pp=2", norm=False, parts=1, bad=35, steps=12)
    found = session.replay()
    assert (found.step, found.is_left_out, found.ran) == (5, True, False)
    assert "a pipeline's forward is not run again" in str(found)


def test_of_a_plain_loop_the_step_whose_weights_are_kept_runs_its_forward(
    session: Session,
) -> None:
    plain = TRAIN.replace("layout.step(*next(batches), loss_fn)", "plain(*next(batches))")
    plain = plain.replace(
        "losses, step",
        "def plain(x, y):\n"
        "    loss = loss_fn(model(x), y)\n"
        "    loss.backward()\n"
        "    return loss.detach()\n"
        "losses, step",
    )
    params = {"text": "ddp", "dropout": 0.0, "norm": False, "optimizer_name": "SGD", "parts": 1}
    more = {"between": "", "after": "", "steps": 10, "bad": None, "autocasts": False}
    session.run(plain, params=params | more, keep=True, timeout_s=4 * LONGEST_S)
    first, other = session.replay(1), session.replay(4)
    assert (first.ran, first.has_weights, is_proven(first)) == (True, True, False)
    assert "No loss proves it on ranks 0-1: its loss is not known" in str(first)
    assert not other.ran
    assert "its loss is not known: only that of layout.step is" in str(other)


@pytest.mark.parametrize("text", ["ddp", pytest.param("zero3", marks=pytest.mark.slow), "tp=2"])
def test_in_one_process_each_part_has_the_loss_of_its_rank(session: Session, text: str) -> None:
    train(session, text=text, dropout=0.0 if text == "tp=2" else 0.25)
    found = session.replay(6, one=True)
    assert found.one is not None
    assert [part.rank for part in found.one] == ([0] if text == "tp=2" else [0, 1])
    for part in found.one:
        (both,) = part.losses
        assert both is not None
        if text == "tp=2":
            assert both[1] == pytest.approx(both[0], rel=1e-6)
        else:
            assert both[1] == both[0], "bit for bit"
    assert is_proven(found)


@pytest.mark.slow
def test_a_bad_sample_is_one_in_one_process_too(session: Session) -> None:
    train(session, bad=35, steps=12)
    found = session.replay(one=True)
    assert found.one is not None
    assert [part.is_finite for part in found.one] == [False, True]
    assert "So it is the model or the data, and not the layout." in str(found)


@pytest.mark.slow
def test_what_a_rank_alone_has_spoiled_is_finite_in_one_process(session: Session) -> None:
    train(session)
    spoil = "step += 1\nif rank == 1:\n    model[2].up.bias.data[0] = float('nan')\n"
    again = "layout.step(*next(batches), loss_fn, skip_nonfinite=True)\noptimizer.step()"
    session.run(spoil + again, timeout_s=LONGEST_S)
    found = session.replay(one=True)
    assert found.one is not None
    assert [part.is_finite for part in found.one] == [True, True]
    assert "So it is the layout: it is not finite on rank 1 alone." in str(found)


def test_without_a_layout_one_process_is_refused_in_words(session: Session) -> None:
    plain = """
from torch.nn.parallel import DistributedDataParallel
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.full((2, 4), float("nan"))).sum().backward()
optimizer.step()
"""
    session.run(plain, guard=True)
    with pytest.raises(nbdist.UsageError, match="cannot run in one process") as error:
        session.replay(one=True)
    assert "no layout" in error.value.why


@pytest.mark.slow
def test_one_rank_is_shown_alone_and_runs_alone_where_others_have_lost_the_step(
    session: Session,
) -> None:
    wrong: Any = "1"
    train(session, bad=35, steps=12, norm=False)
    assert list(session.replay(rank=0).ranks) == [0]
    assert list(session.replay(8, rank=1).ranks) == [1]
    session.restart("1")
    with pytest.raises(nbdist.UsageError, match="Rank 1 has nothing of step 5"):
        session.replay(5)
    found = session.replay(5, rank=0)
    assert found.ranks[0].forwards[0].rows == (3,)
    with pytest.raises(nbdist.UsageError, match="Rank 1 has nothing of step 5"):
        session.replay(5, rank=1)
    with pytest.raises(nbdist.UsageError, match="rank is the number of a rank"):
        session.replay(5, rank=wrong)


FAIL = "\nif rank == 1:\n    raise ValueError('a bug')\ntrain(1)"


@pytest.mark.parametrize("text", [pytest.param("ddp", marks=pytest.mark.slow), "zero3"])
def test_of_a_cell_that_fails_the_newest_steps_outlive_the_ranks(
    session: Session, text: str
) -> None:
    params = {"text": text, "dropout": 0.25, "norm": True, "optimizer_name": "AdamW", "parts": 2}
    more = {"between": "layout.clip_grad_norm_(0.5)", "after": "", "steps": 32, "bad": None}
    more["autocasts"] = False
    with pytest.raises(nbdist.RankError):
        session.run(TRAIN + FAIL, params=params | more, keep=True, timeout_s=4 * LONGEST_S)
    before = str(session.replay(28))
    session.restart()
    session.run(TRAIN, params=params | more | {"steps": 2}, timeout_s=4 * LONGEST_S)
    built = session.replay(28, saved="last")
    assert "what made its loss is code, which is not on disk" in str(built)
    session.run("train(1)", timeout_s=LONGEST_S)
    state = session.run(STATE).value_list
    *found, where = str(session.replay(28, saved="last")).splitlines()
    assert "\n".join(found) == before
    assert "the losses of all 4 steps are equal bit for bit" in before
    assert where.startswith("Kept in ")
    assert session.run(STATE).value_list == state


def test_the_magic_shows_one_rank_and_one_process(notebook: Kernel) -> None:
    code = TRAIN.replace("exec(between)", "pass").replace("exec(after)", "pass")
    names = {"text": "'ddp'", "dropout": "0.0", "norm": "False", "optimizer_name": "'SGD'"}
    names |= {"parts": "1", "steps": "6", "bad": "None", "autocasts": "False"}
    given = "\n".join(f"{name} = {value}" for name, value in names.items())
    assert notebook.cell(f"{given}\n{code}", "--keep").error is None
    said = notebook.run("%dist replay 3 --rank 1 --one").text
    assert said.startswith("Step 3 was made on rank 1.")
    assert "the part of rank 1: every output of its forward is finite" in said
