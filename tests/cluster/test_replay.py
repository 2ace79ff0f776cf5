"""`%dist replay` names rank, module and sample of a step that was left out, and changes nothing."""

from collections.abc import Mapping

import pytest

import nbdist
from nbdist import Session
from nbdist.client.cells.replays import BadModule, Replayed
from tests.cluster.conftest import LONGEST_S, Kernel

# Three steps of 8 samples over two ranks, then one more with what `planted` says: "nan" in sample
# `BAD`, which one rank gets, or a negative number there that a logarithm of the model gets, or
# weights of a Linear that overflow. Dropout and batch norm draw and move on.
MAKE = """
BAD = 19
class Log(torch.nn.Module):
    def forward(self, x):
        return x.log()
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
        self.drop = torch.nn.Dropout(0.25)
    def forward(self, x):
        return x + self.drop(self.down(torch.relu(self.up(x))))
torch.manual_seed(0)
model = torch.nn.Sequential(Log(), Block(), torch.nn.BatchNorm1d(8), Block())
cut = nbdist.TensorParallel(example=torch.ones(2, 8), plan={"*.up": "column", "*.down": "row"})
layout = nbdist.parallelize(model, text, *([cut] if text == "tp=2" else []))
torch.manual_seed(0 if text == "tp=2" else rank)
optimizer = layout.optimizer(torch.optim.AdamW, lr=0.01)
x = torch.rand(24, 8, generator=torch.Generator().manual_seed(1)) + 0.5
if planted in ("nan", "log"):
    x[BAD, 3] = float("nan") if planted == "nan" else -1.0
data = torch.utils.data.TensorDataset(x, torch.ones(24, 8))
loader = nbdist.loader(data, global_batch=8, shuffle=False)
def train():
    for x, y in loader:
        layout.step(x, y, torch.nn.functional.mse_loss, skip_nonfinite=True)
        optimizer.step()
        optimizer.zero_grad()
"""
OVERFLOW = """
with torch.no_grad():
    local = getattr(model[3].up.weight, "_local_tensor", model[3].up.weight)
    kept = local.clone()
    if whole or rank == 0:
        local.fill_(3e38)
train()
with torch.no_grad():
    local.copy_(kept)
"""
TRAIN_ON = """
train()
states = [v for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)]
locals_ = [getattr(t, "_local_tensor", t).detach() for t in
           [*model.parameters(), *model.buffers(), *states]]
hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
str([[t.tolist() for t in locals_], torch.rand(2).tolist(), hooks, loader.epoch])
"""
# What is dropped has no logarithm: rows by the random numbers of each rank, noted in `drawn`.
DROPPED = """
drawn = []
class Log(torch.nn.Module):
    def forward(self, x):
        out = x.log()
        drawn.append((~out.isfinite().all(dim=1)).nonzero().flatten().tolist())
        return out
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Dropout(0.02), Log(), torch.nn.Linear(8, 1))
layout = nbdist.parallelize(model, "ddp")
torch.manual_seed(rank)
optimizer = layout.optimizer(torch.optim.AdamW, lr=0.01)
for step in range(3):
    x = torch.rand(32, 8) + 0.5
    layout.step(x, torch.ones(32, 1), torch.nn.functional.mse_loss, skip_nonfinite=True)
    optimizer.step()
    optimizer.zero_grad()
drawn[0]
"""
PLAIN = """
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
if spread:
    from torch.nn.parallel import DistributedDataParallel
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, 4):
    x = torch.ones(3, 4)
    if step == first and rank == 1:
        x[1] = float("inf")
    for part in x, torch.ones(3, 4):
        model(part).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
# Of 256.1 and 256 bfloat16 knows no difference: where `Gap` computes in it, it divides by zero.
# A logarithm of `bad` negative rows is not a number in any precision.
LOW = """
class Gap(torch.nn.Module):
    def forward(self, x):
        return x / ((x * 0 + 256.1) - 256)
class Log(torch.nn.Module):
    def forward(self, x):
        return x.log()
torch.manual_seed(0)
wide = [torch.nn.Linear(8, 16), torch.nn.Linear(16, 8), torch.nn.BatchNorm1d(8)]
model = torch.nn.Sequential(Log(), torch.nn.Sequential(*wide, Gap()), torch.nn.Linear(8, 4))
dtype = torch.bfloat16 if how == "weights" else torch.float32
example = torch.ones(2, 8, dtype=dtype)
cut = nbdist.TensorParallel(example=example, plan={"1.0": "column", "1.1": "row"})
more = [cut] if text == "tp=2" else []
if how == "policy":
    more.append(nbdist.Precision("bf16"))
model = model.to(dtype)
layout = nbdist.parallelize(model, text, *more)
optimizer = layout.optimizer(torch.optim.SGD, lr=0.1)
x = torch.rand(4, 8) + 0.5
if rank == bad:
    x[2, 0] = -1.0
x = x.to(dtype)
with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
    loss = model(x).float().square().mean()
loss.backward()
optimizer.step()
"""
HELD = """
held = [*model.parameters(), *model.buffers()]
str([[str(t.dtype), getattr(t, "_local_tensor", t).detach().tolist()] for t in held])
"""
LAYOUTS = ["ddp", "zero3", "tp=2"]


def run(session: Session, code: str, **params: object) -> nbdist.CellResult:
    return session.run(code, params=params, timeout_s=4 * LONGEST_S)


def modules(found: Replayed) -> Mapping[int, BadModule | None]:
    return {rank: one.forwards[0].module for rank, one in found.ranks.items()}


@pytest.mark.parametrize("text", LAYOUTS)
@pytest.mark.parametrize("planted", ["nan", "log"])
def test_a_bad_sample_of_one_rank_is_named(session: Session, text: str, planted: str) -> None:
    run(session, MAKE + "train()", text=text, planted=planted)
    found = session.replay()
    assert (found.step, found.ran, found.has_weights) == (3, True, True)
    # Positions 16-19 are rank 0's part of the third batch, all 8 are both ranks' under tp.
    for rank, one in found.ranks.items():
        (forward,) = one.forwards
        has_it = rank == 0 or text == "tp=2"
        first = 16 + 4 * rank
        assert forward.positions == (range(16, 24) if text == "tp=2" else range(first, first + 4))
        if has_it:
            assert forward.module is not None
            assert (forward.module.name, forward.module.kind) == ("0", "Log")
            assert (forward.rows, forward.samples) == ((3,), (19,))
            assert forward.is_input == forward.module.is_passed_on == (planted == "nan")
        else:
            assert (forward.module, forward.rows, forward.is_input) == (None, (), False)
        assert one.bad_gradients, "gradients are averaged, or each rank has its parts"
    assert "dataset[19]" in str(found)


@pytest.mark.parametrize("text", LAYOUTS)
def test_a_module_that_overflows_is_named_and_no_sample(session: Session, text: str) -> None:
    run(session, MAKE, text=text, planted="")
    run(session, OVERFLOW, whole=True)
    found = session.replay()
    assert found.has_weights
    for one in found.ranks.values():
        (forward,) = one.forwards
        assert forward.module == BadModule("3.up", "Linear", (), False)
        assert (forward.rows, forward.samples, forward.is_all) == ((), None, True)


def test_a_shard_that_overflows_is_named_on_its_rank(session: Session) -> None:
    run(session, MAKE, text="tp=2", planted="")
    run(session, OVERFLOW, whole=False)
    first, second = modules(session.replay()).values()
    assert first is not None
    assert first.name == "3.up"
    assert second is not None
    assert second.name != "3.up", "its own part of that module is sound"


@pytest.mark.parametrize(
    "text", ["zero3", *(pytest.param(text, marks=pytest.mark.slow) for text in ("ddp", "tp=2"))]
)
def test_training_goes_on_bit_equal_to_one_that_was_not_looked_into(
    session: Session, text: str
) -> None:
    done = []
    for looks in (False, True):
        run(session, MAKE + "train()", text=text, planted="nan")
        if looks:
            session.replay()
            assert str(session.replay(3)) == str(session.replay())
            assert all(one.backward for one in session.replay(anomaly=True).ranks.values())
        done.append(run(session, TRAIN_ON).value_list)
    assert done[0] == done[1]


@pytest.mark.slow
def test_of_the_first_step_of_a_cell_positions_are_known_and_no_sample_is_claimed(
    session: Session,
) -> None:
    code = MAKE.replace("BAD = 19", "BAD = 3") + "train()"
    run(session, code, text="ddp", planted="log")
    found = session.replay()
    (forward,) = found.ranks[0].forwards
    assert (found.step, forward.rows, forward.samples) == (1, (3,), None)
    assert (forward.positions, forward.batch) == (range(4), (0, 1, 2, 3))


@pytest.mark.slow
def test_a_forward_runs_again_with_the_random_numbers_that_it_drew(session: Session) -> None:
    drawn = run(session, DROPPED).value_list
    found = session.replay(1)
    assert [list(one.forwards[0].rows) for one in found.ranks.values()] == drawn
    assert all(0 < len(rows) < 32 for rows in drawn)
    assert {str(module) for module in modules(found).values()} == {"1 (Log)"}


def test_a_plain_loop_is_looked_into_from_its_first_step(session: Session) -> None:
    session.run(PLAIN, params={"spread": True, "first": 1}, guard=True, timeout_s=LONGEST_S)
    found = session.replay()
    assert found.step == 1
    micro_batches = [[one.module for one in rank.forwards] for rank in found.ranks.values()]
    assert micro_batches == [[None, None], [BadModule("0", "Linear", (), True), None]]
    assert found.ranks[1].forwards[0].rows == (1,)
    assert found.ranks[1].bad_gradients == ("0", "2")


@pytest.mark.slow
def test_a_step_of_an_earlier_cell_is_not_taken_for_one_of_the_newest(session: Session) -> None:
    for first in (2, 9):  # there is no ninth step
        session.run(PLAIN, params={"spread": True, "first": first}, guard=True, timeout_s=LONGEST_S)
        found = session.replay()
        assert (found.step, found.is_older) == (2, first == 9)
    session.run("1 + 1")
    assert session.replay().is_older


def test_a_rank_that_trains_by_itself_is_looked_into_alone(session: Session) -> None:
    session.run(PLAIN, params={"spread": False, "first": 2}, guard=True, timeout_s=LONGEST_S)
    found = session.replay(2)
    assert list(found.ranks) == [1]
    assert found.ranks[1].forwards[0].rows == (1,)


@pytest.mark.slow
def test_without_evidence_it_is_refused_in_words(notebook: Kernel) -> None:
    notebook.run("%dist stop")
    notebook.run("%dist start -n 2 --device cpu", timeout_s=2 * LONGEST_S)
    refused = notebook.run("%dist replay")
    assert refused.error is not None
    assert "No step is kept that was left out" in refused.error[1]
    code = PLAIN.replace("spread", "True").replace("first", "2")
    assert notebook.cell(code, "--guard").error is None
    assert "sample 1 of its batch" in notebook.run("%dist replay").text
    other = notebook.run("%dist replay 3")
    assert other.error is not None
    assert "Step 3 is not kept" in other.error[1]


LOW_PRECISIONS = [
    ("ddp", "policy"),
    ("ddp", "autocast"),
    ("ddp", "weights"),
    ("zero3", "autocast"),
    ("tp=2", "policy"),
    ("tp=2", "weights"),
]


def in_float32(session: Session, text: str, how: str, bad: int = -1) -> Replayed:
    params = {"text": text, "how": how, "bad": bad}
    session.run(LOW, params=params, guard=True, timeout_s=2 * LONGEST_S)
    return session.replay(fp32=True)


@pytest.mark.parametrize(("text", "how"), LOW_PRECISIONS)
def test_what_bfloat16_has_rounded_away_is_finite_in_float32(
    session: Session, text: str, how: str
) -> None:
    found = in_float32(session, text, how)
    assert {str(module) for module in modules(found).values()} == {"1.3 (Gap)"}
    assert "In float32 every output is finite: it is the range or the rounding of bfloat16." in str(
        found
    )
    before = run(session, HELD).value_list
    session.replay(fp32=True)
    assert run(session, HELD).value_list == before


def test_what_float32_cannot_hold_either_is_told_with_the_rank_and_the_sample(
    session: Session,
) -> None:
    found = in_float32(session, "ddp", "autocast", bad=1)
    said = str(found).splitlines()
    assert "In float32 it is not finite on rank 1 either:" in said
    assert "In float32 every output on rank 0 is finite." in said
    again = found.ranks[1].float32
    assert again is not None
    assert (str(again[0].module), again[0].rows) == ("0 (Log)", (2,))


def test_a_forward_of_float32_is_said_to_be_one(session: Session) -> None:
    found = in_float32(session, "ddp", "nothing", bad=1)
    assert "In float32 it is the same: it has no autocast" in str(found)


@pytest.mark.parametrize(
    ("how", "why"),
    [("policy", "gathers its weights in bfloat16"), ("weights", "are bfloat16 themselves")],
)
def test_units_that_compute_in_a_lower_precision_cannot_run_in_float32(
    session: Session, how: str, why: str
) -> None:
    with pytest.raises(nbdist.UsageError, match="cannot run in float32 on ranks 0-1") as error:
        in_float32(session, "zero3", how)
    assert why in error.value.why
    assert {str(module) for module in modules(session.replay()).values()} == {"1.3 (Gap)"}


# In the backward of the block rank 1 makes a gradient too large, of its part alone.
BURST = """
class Burst(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, grad):
        return grad * 1e38 * 1e38
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
    def forward(self, x):
        hidden = torch.relu(self.up(x))
        return x + self.down(Burst.apply(hidden) if rank == 1 else hidden)
torch.manual_seed(0)
cut = nbdist.TensorParallel(example=torch.ones(2, 8), plan={"*.up": "column", "*.down": "row"})
model = torch.nn.Sequential(torch.nn.Linear(8, 8), Block())
layout = nbdist.parallelize(model, text, *([cut] if text == "tp=2" else []))
optimizer = layout.optimizer(torch.optim.AdamW, lr=0.01)
layout.step(torch.ones(4, 8), torch.zeros(4, 8), torch.nn.functional.mse_loss, skip_nonfinite=True)
optimizer.step()
"""
# A loss with a parameter of its own, by hand or by the layout, of two micro-batches.
PARTS = """
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
layout = nbdist.parallelize(model, "ddp")
own = torch.nn.Parameter(torch.ones(()))
optimizer = torch.optim.SGD([*model.parameters(), own], lr=0.1)
if how == "hook":
    model.bias.register_post_accumulate_grad_hook(lambda p: None)
x, y = torch.ones(2, 4), torch.ones(2, 4)
def loss_fn(out, y):
    return ((out - out.detach()) * own * y).square().sum(dim=1).sqrt().mean()
for part in layout.accumulate(2):
    if how == "loop":
        loss_fn(layout.model(x), y).backward()
    else:
        layout.step(x, y, loss_fn, skip_nonfinite=True)
optimizer.step()
if how == "changed":
    y.zero_()
own.grad = torch.full((), 7.0)
"""


@pytest.mark.parametrize("text", ["ddp", "tp=2"])
def test_an_operation_that_bursts_on_one_rank_is_told_from_what_others_get_of_it(
    session: Session, text: str
) -> None:
    run(session, BURST, text=text)
    found = session.replay(anomaly=True)
    first, second = (one.backward for one in found.ranks.values())
    assert second is not None
    assert second[0] is not None
    assert str(second[0]).startswith("BurstBackward in 1 (Block) (cell ")
    assert not second[0].is_shared
    assert second[0].place.endswith(", line 14")
    assert first is not None
    if text == "ddp":
        assert first == (None,)
    else:
        assert first[0] is not None
        assert first[0].is_shared, "into the backward of its part it comes from the other rank"


def test_the_loss_of_each_micro_batch_runs_again_and_leaves_no_gradient(session: Session) -> None:
    run(session, PARTS, how="step")
    found = session.replay(anomaly=True)
    for one in found.ranks.values():
        assert one.backward is not None
        firsts = [str(first).split(" (cell ")[0] for first in one.backward]
        assert firsts == ["SqrtBackward0 in the loss"] * 2
    left = run(session, "str((own.grad.item(), [p.grad for p in model.parameters()]))")
    assert left.value_list == ["(7.0, [None, None])"] * 2


@pytest.mark.parametrize(
    ("how", "why"),
    [
        (
            "loop",
            "its loss is not known: layout.step's alone are, by the ranks that have made them",
        ),
        ("changed", "its targets have been changed in place since"),
        ("hook", "its parameters have hooks that act on a gradient once it is there"),
    ],
)
def test_a_backward_that_cannot_run_again_is_told_with_the_reason(
    session: Session, how: str, why: str
) -> None:
    session.run(PARTS, params={"how": how}, guard=True, timeout_s=2 * LONGEST_S)
    found = session.replay(anomaly=True)
    assert found.ran
    assert f"Its backward did not run again:\n  ranks 0-1: {why}\n" in str(found)
