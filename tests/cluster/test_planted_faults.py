"""Faults of many kinds, planted at step 3 of a training: what `%dist replay` says of each is right.

Step, rank, module and sample are named where they can be known; where not, none is invented, and
the answer says what is left. A fault is of sample 19 (`DATA`), which the third batch has in its row
3, on rank 0 where ranks share batches; or of weights, of the loss or of the backward.
"""

from dataclasses import dataclass

import pytest

from nbdist import Session
from nbdist.client.cells.replays import Replayed
from tests.cluster.conftest import LONGEST_S

pytestmark = pytest.mark.slow

MAKE = """
from torch import nn
from torch.nn import functional as F
armed = False

class Plant(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8, eps=0, elementwise_affine=False)
        self.register_buffer("scale", torch.ones(()))
        if kind == "row of an embedding":
            self.table = nn.Embedding(4, 8)
            with torch.no_grad():
                self.table.weight[3] = float("nan")
    def forward(self, x):
        return DATA[kind](self, x) * self.scale if kind in DATA else x * self.scale

class Inner(nn.Module):
    def forward(self, x):
        return BACKWARD[kind](x) if armed and kind in BACKWARD else x

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        if kind == "huge input":
            nn.init.constant_(self.up.weight, 0.5)
    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

class Burst(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, grad):
        return grad * 1e38 * 1e38

DATA = {
    "log of zero": lambda plant, x: x.log(),
    "log of a negative number": lambda plant, x: x.log(),
    "division by zero": lambda plant, x: x / x.sum(dim=1, keepdim=True),
    "exp": lambda plant, x: x.exp(),
    "float16": lambda plant, x: (x.half() * 4).float(),
    "bfloat16": lambda plant, x: 1 / ((x.bfloat16() + 256) - 256).float(),
    "all is masked": lambda plant, x: x.masked_fill(x < 0, -torch.inf).softmax(dim=1),
    "norm of a constant": lambda plant, x: plant.norm(x),
    "row of an embedding": lambda plant, x: x + plant.table((x[:, 0] > 50).long() * 3),
}
BACKWARD = {
    "gradient of sqrt": lambda x: (x - x.detach()).square().sqrt(),
    "gradient of where": lambda x: torch.where(x > 99, (x - 99).sqrt(), 0),
    "gradient that bursts": Burst.apply,
}
BAD = {
    "nan in the input": (3, float("nan")),
    "inf in the input": (3, float("inf")),
    "huge input": (slice(None), 3e38),
    "log of zero": (3, 0.0),
    "log of a negative number": (3, -1.0),
    "division by zero": (slice(None), 0.0),
    "exp": (3, 100.0),
    "float16": (3, 3e4),
    "bfloat16": (3, 0.1),
    "all is masked": (slice(None), -1.0),
    "norm of a constant": (slice(None), 1.0),
    "row of an embedding": (0, 100.0),
}
torch.manual_seed(0)
model = nn.Sequential(Plant(), Block(), Inner(), Block())
example = torch.arange(16.0).reshape(2, 8) + 2
plan = {"*.up": "column", "*.down": "row"}
more = {
    "tp=2": [nbdist.TensorParallel(example=example, plan=plan)],
    "pp=2": [nbdist.Pipeline(example=example)],
}
layout = nbdist.parallelize(model, text, *more.get(text, []))
lr = 1e30 if kind == "learning rate" else 0.01
optimizer = layout.optimizer(torch.optim.AdamW, lr=lr)
x = torch.rand(24, 8, generator=torch.Generator().manual_seed(1)) + 1.0
y = torch.ones(24, 8)
if kind in BAD:
    place, value = BAD[kind]
    x[19, place] = value
if kind == "bfloat16":
    x[:] = x.clamp(min=2.0)
    x[19, place] = value
if kind == "target":
    y[19] = float("nan")
if kind == "mean of none":
    y[16:] = -1.0
data = torch.utils.data.TensorDataset(x, y)
loader = nbdist.loader(data, global_batch=8, shuffle=False)
def loss_fn(out, y):
    if kind == "mean of none":
        counts = (y >= 0).float()
        return (F.mse_loss(out, y, reduction="none") * counts).sum() / counts.sum()
    loss = F.mse_loss(out, y)
    return loss * 1e38 * 1e38 if kind == "loss scale" and armed else loss
def fill(tensor):
    with torch.no_grad():
        getattr(tensor, "_local_tensor", tensor).fill_(float("nan"))
for step, (x, y) in enumerate(loader, 1):
    armed = step == 3
    if armed and kind == "weight":
        for name, parameter in model.named_parameters():
            if "1.up.bias" in name:
                fill(parameter)
    if armed and kind == "buffer":
        for name, buffer in model.named_buffers():
            fill(buffer)
    layout.step(x, y, loss_fn, skip_nonfinite=True)
    optimizer.step()
    optimizer.zero_grad()
"""


@dataclass(frozen=True)
class Fault:
    """What is to be known of a kind of fault where its forward runs again.

    `module` is the first whose output is not finite, None where the forward is finite; `weights`
    what is not finite in it. `burst` is the first operation whose gradient is not finite, where the
    forward is. `of_sample`: it is one sample's, by its target where `is_target`. The
    loss is not finite where `is_loss`; else it is the backward's, or the forward's.
    """

    kind: str
    module: str | None
    burst: str = ""
    weights: tuple[str, ...] = ()
    of_sample: bool = False
    is_input: bool = False
    is_target: bool = False
    is_loss: bool = False


FAULTS = [
    Fault("nan in the input", "0 (Plant)", of_sample=True, is_input=True),
    Fault("inf in the input", "0 (Plant)", of_sample=True, is_input=True),
    Fault("huge input", "1.up (Linear)", of_sample=True),
    Fault("log of zero", "0 (Plant)", of_sample=True),
    Fault("log of a negative number", "0 (Plant)", of_sample=True),
    Fault("division by zero", "0 (Plant)", of_sample=True),
    Fault("exp", "0 (Plant)", of_sample=True),
    Fault("float16", "0 (Plant)", of_sample=True),
    Fault("bfloat16", "0 (Plant)", of_sample=True),
    Fault("all is masked", "0 (Plant)", of_sample=True),
    Fault("norm of a constant", "0.norm (LayerNorm)", of_sample=True),
    Fault("row of an embedding", "0.table (Embedding)", weights=("weight",), of_sample=True),
    Fault("weight", "1.up (Linear)", weights=("bias",)),
    Fault("buffer", "0 (Plant)", weights=("scale",)),
    Fault("gradient of sqrt", None, "SqrtBackward0 in 2 (Inner)"),
    Fault("gradient of where", None, "SqrtBackward0 in 2 (Inner)"),
    Fault("gradient that bursts", None, "BurstBackward in 2 (Inner)"),
    Fault("loss scale", None, "MulBackward0 in the loss", is_loss=True),
    Fault("mean of none", None, "DivBackward0 in the loss", is_loss=True),
    Fault(
        "target",
        None,
        "MseLossBackward0 in the loss",
        of_sample=True,
        is_target=True,
        is_loss=True,
    ),
]


def planted(session: Session, kind: str, text: str) -> Replayed:
    params = {"kind": kind, "text": text}
    session.run(MAKE, params=params, timeout_s=4 * LONGEST_S)
    assert session.trained is not None
    assert session.trained.telemetry.series("left_out"), "else an older cell's step is looked into"
    return session.replay(anomaly=True)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.kind)
@pytest.mark.parametrize("text", ["ddp", "zero3", "tp=2"])
def test_what_can_be_known_of_a_fault_is_named_and_nothing_else(
    session: Session, text: str, fault: Fault
) -> None:
    found = planted(session, fault.kind, text)
    assert (found.step, found.ran, found.has_weights) == (3, True, True)
    assert list(found.ranks) == [0, 1]
    for rank, one in found.ranks.items():
        (forward,) = one.forwards
        has_it = not fault.of_sample or rank == 0 or text == "tp=2"
        module = fault.module if has_it else None
        assert (None if forward.module is None else str(forward.module)) == module
        assert forward.is_input == (has_it and fault.is_input)
        if forward.module is not None:
            assert forward.module.weights == fault.weights
        is_named = has_it and fault.of_sample
        assert forward.rows == ((3,) if is_named and not fault.is_target else ())
        assert (forward.samples or ()) == ((19,) if is_named and not fault.is_target else ())
        assert forward.beside == (((3, 19),) if is_named and fault.is_target else ())
        assert one.bad_gradients
        assert one.backward is not None
        (first,) = one.backward
        if fault.module is None:
            # "MulBackward0 in the loss (cell 7, line 98) is the first whose ..."
            assert (str(first).split(" (cell ")[0] if has_it else first) == (
                fault.burst if has_it else None
            )
            assert first is None or ", line " in first.place
    on = "rank 0" if fault.of_sample and text != "tp=2" else "ranks 0-1"
    left = f"the loss, on {on}, " if fault.is_loss else "the loss or the backward, "
    assert (f"So it is {left}" in str(found)) == (fault.module is None)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.kind)
def test_of_a_pipeline_the_step_and_the_gradients_are_named_and_it_is_said_why(
    session: Session, fault: Fault
) -> None:
    found = planted(session, fault.kind, "pp=2")
    assert (found.step, found.ran) == (3, False)
    assert "its forward was not seen: a pipeline's" in str(found)
    assert any(one.bad_gradients for one in found.ranks.values())
    for one in found.ranks.values():
        assert one.backward is None
        assert all(f.module is None and not f.rows and f.samples is None for f in one.forwards)


@pytest.mark.parametrize("text", ["ddp", "zero3", "tp=2"])
def test_of_a_learning_rate_that_explodes_the_step_after_it_is_named(
    session: Session, text: str
) -> None:
    newest = planted(session, "learning rate", text)
    assert newest.step == 3
    found = session.replay(2)
    for one in found.ranks.values():
        (forward,) = one.forwards
        assert forward.module is not None
        assert forward.module.weights == ()
        assert not forward.module.is_passed_on
        assert one.bad_gradients
