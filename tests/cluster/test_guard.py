"""A step that is not finite on any rank is left out on all: --guard, and skip_nonfinite."""

import pytest

import nbdist
from nbdist import Session
from tests.cluster.conftest import LONGEST_S, Kernel

# Four steps of AdamW on four blocks; at the third one, rank `bad` has a nan in its batch. `made`
# says whether that step calls the optimizer at all: what is left out is as if it did not.
TRAIN = """
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))
torch.manual_seed(0)
model = torch.nn.Sequential(*(Block() for _ in range(4)))
cut = nbdist.TensorParallel(example=torch.ones(2, 8), plan={"*.up": "column", "*.down": "row"})
layout = nbdist.parallelize(model, text, *([cut] if text == "tp=2" else []))
optimizer = layout.optimizer(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
draw = torch.Generator().manual_seed(1)
for step in range(1, 5):
    x = torch.randn(8, 8, generator=draw)
    if step == 3 and rank in bad:
        x[0, 0] = float("nan")
    layout.step(x, torch.ones(8, 8), torch.nn.functional.mse_loss, skip_nonfinite=asks)
    if made or step != 3:
        optimizer.step()
    schedule.step()
    optimizer.zero_grad()
{name: value.tolist() for name, value in layout.state_dict().items()}
"""
# A plain loop: steps 2 and 4 of rank 1 are infinite.
PLAIN = """
torch.manual_seed(0)
from torch.nn.parallel import DistributedDataParallel
model = torch.nn.Linear(4, 1)
model = DistributedDataParallel(model) if spread else model
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(1, 6):
    x = torch.full((2, 4), float(step))
    if step in (2, 4) and rank == 1:
        x[0] = float("inf")
    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss
    if with_closure:
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()
[p.isfinite().all().item() for p in model.parameters()]
"""


# At step `bad` the batch has a nan; at step `left` none is made.
NORMED = """
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
nbdist.parallelize(model, "ddp")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, 6):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    if step == bad:
        x[0, 0] = float("nan")
    if step != left:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
{name: value.tolist() for name, value in model.state_dict().items()}
"""
# Between steps 1 and 2 the loop writes into a buffer; each forward writes into another.
WRITTEN = """
class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("seen", torch.zeros(()))
    def forward(self, x):
        self.seen += 1
        return self.linear(x) * self.scale
model = Scaled()
nbdist.parallelize(model, "ddp")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, 4):
    if step == 2:
        with torch.no_grad():
            model.scale.fill_(value)
    model(torch.full((2, 4), 1.0 if step != bad else float("nan"))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
str((model.scale.item(), model.seen.item()))
"""

# One optimizer for the matrices, one for the biases; at step 3 what is `spoiled` has a nan.
TWO = """
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
nbdist.parallelize(model, "ddp")
optimizers = [torch.optim.SGD([model.weight], lr=0.1), torch.optim.AdamW([model.bias], lr=0.1)]
moved = []
for step in range(1, 6):
    before = [p.detach().clone() for p in model.parameters()]
    loss = model(torch.ones(2, 4)).square().mean()
    if step == 3:
        loss = loss + sum((p.sum() * 0).sqrt() for n, p in model.named_parameters() if n in spoiled)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    if step == 3:
        moved = [not torch.equal(b, p) for b, p in zip(before, model.parameters())]
moved
"""
# A GAN: the discriminator's gradients are not finite at step 4, the generator's at step 6.
TURNS = """
torch.manual_seed(0)
made, judged = torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 1)
for model in (made, judged):
    nbdist.parallelize(model, "ddp")
makes, judges = (torch.optim.Adam(model.parameters()) for model in (made, judged))
x = torch.ones(2, 4)
for step in range(1, 9):
    judges.zero_grad()
    loss = judged(made(x).detach()).mean() - judged(x).mean()
    (loss * (float("inf") if step == 4 else 1.0)).backward()
    judges.step()
    makes.zero_grad()
    (-judged(made(x)).mean() * (float("inf") if step == 6 else 1.0)).backward()
    makes.step()
[p.isfinite().all().item() for model in (made, judged) for p in model.parameters()]
"""
# Ranks report what they train with of steps 2, 5 and 10 among others.
OBSERVED = """
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
nbdist.parallelize(model, "ddp")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, 21):
    factor = float("inf") if step in (2, 5, 10) else 1.0
    (model(torch.ones(2, 4)).square().mean() * factor).backward()
    optimizer.step()
    optimizer.zero_grad()
"""

SHARE_DATA = ("ddp", "zero1", "zero2", "zero3")  # each rank has a batch of its own


def train(session: Session, text: str, **more: object) -> nbdist.CellResult:
    params = {"text": text, "bad": (), "made": True, "asks": True} | more
    return session.run(TRAIN, params=params, timeout_s=4 * LONGEST_S, show=True)


def test_statistics_of_a_batch_norm_are_after_a_left_out_step_as_before_it(
    session: Session,
) -> None:
    without = session.run(NORMED, params={"bad": 0, "left": 3}, guard=True)
    left_out = session.run(NORMED, params={"bad": 3, "left": 0}, guard=True)
    assert left_out.value_list == without.value_list


def test_a_buffer_that_the_loop_wrote_before_a_left_out_step_stays_as_it_was_written(
    session: Session,
) -> None:
    written = session.run(WRITTEN, params={"bad": 2, "value": 0.5}, guard=True)
    assert written.value_list == ["(0.5, 2.0)"] * 2


def test_of_a_buffer_that_the_loop_has_spoiled_replay_says_so(session: Session) -> None:
    session.run(WRITTEN, params={"bad": 0, "value": float("nan")}, guard=True)
    for one in session.replay(2).ranks.values():
        (forward,) = one.forwards
        assert forward.module is not None
        assert forward.module.weights == ("scale",)


@pytest.mark.parametrize(
    "text",
    [
        "zero3",
        "pp=2",
        *(pytest.param(text, marks=pytest.mark.slow) for text in ("ddp", "zero1", "zero2", "tp=2")),
    ],
)
def test_a_step_that_one_rank_spoils_is_as_if_no_rank_had_made_it(
    session: Session, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    without = train(session, text, made=False)
    assert "left out" not in capsys.readouterr().out
    left_out = train(session, text, bad=(1,) if text in SHARE_DATA else (0, 1))
    assert left_out.value_list[0]
    assert left_out.value_list == without.value_list
    assert (
        "Step 3 was left out on all ranks: gradients were not finite. Weights, buffers and the "
        "optimizer's state are as before; a schedule has counted it.\n"
    ) in capsys.readouterr().out


def test_the_same_step_spoils_a_model_where_nobody_asks(session: Session) -> None:
    spoiled = train(session, "ddp", bad=(1,), asks=False).value_list[0]
    assert any("nan" in str(value) for value in spoiled.values())


@pytest.mark.parametrize("with_closure", [False, True])
def test_a_plain_loop_is_guarded_by_the_option_of_its_cell(
    session: Session, with_closure: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    params = {"spread": True, "with_closure": with_closure}
    ran = session.run(PLAIN, params=params, guard=True, show=True, timeout_s=LONGEST_S)
    assert ran.value_list == [[True, True]] * 2
    assert "Steps 2 and 4 were left out on all ranks" in capsys.readouterr().out
    assert session.trained is not None
    for rank, series in session.trained.telemetry.series("left_out").items():
        points = list(zip(series.steps[: series.n], series.values[: series.n], strict=True))
        assert points == [(2.0, 1.0), (4.0, 2.0)], rank


def test_steps_that_are_left_out_where_they_are_observed_give_no_alarm(session: Session) -> None:
    session.run(OBSERVED, guard=True, timeout_s=LONGEST_S)
    assert session.alarms == ()


@pytest.mark.parametrize(
    ("spoiled", "moved", "said"),
    [
        (["weight"], [False, True], "for SGD (1 parameter) alone"),
        (["bias"], [True, False], "for AdamW (1 parameter) alone"),
        (["weight", "bias"], [False, False], "Weights, buffers and the optimizer's state are"),
    ],
)
def test_of_two_optimizers_it_is_said_whose_step_was_left_out(
    session: Session,
    spoiled: list[str],
    moved: list[bool],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    params = {"spoiled": spoiled}
    ran = session.run(TWO, params=params, guard=True, show=True, timeout_s=LONGEST_S)
    assert ran.value_list == [moved] * 2
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "left out" in line]
    assert line.startswith("Step 3 was left out on all ranks")
    assert said in line
    assert session.replay().step == 3


def test_of_two_models_in_turns_each_one_s_steps_are_told(notebook: Kernel) -> None:
    ran = notebook.cell(TURNS, "--guard --no-track")
    assert ran.error is None
    assert "False" not in ran.text
    said = [line for line in ran.text.splitlines() if " was left out on " in line]
    assert [line[: line.index(" was")] for line in said] == ["Step 4", "Step 6"]


def test_of_a_model_that_each_rank_trains_alone_a_rank_leaves_out_its_own_steps(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    params = {"spread": False, "with_closure": False}
    ran = session.run(PLAIN, params=params, guard=True, show=True, timeout_s=LONGEST_S)
    assert ran.value_list == [[True, True]] * 2
    assert (
        "Steps 2 and 4 were left out on rank 1, which trains by itself: " in capsys.readouterr().out
    )
