"""The learning rate follows the batch, or the notebook says that it did not."""

import pytest

from nbdist import RankError, Session
from tests.cluster.conftest import Kernel

# Every rank takes 4 samples a step, whatever their number.
PER_RANK = """
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
torch.manual_seed(0)
samples = torch.arange(48.).reshape(16, 3)
def train(model, **options):
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    if options:
        nbdist.scale_lr(opt, **options)
    for x in DataLoader(samples, batch_size=4):
        model(x).mean().backward(); opt.step(); opt.zero_grad()
"""


def test_a_batch_that_grew_with_the_ranks_is_told_once(notebook: Kernel) -> None:
    alone = notebook.cell(PER_RANK + "train(torch.nn.Linear(3, 11))", "-r 0 --no-track")
    assert alone.error is None, alone.error
    assert "learning rate" not in alone.text
    both = notebook.cell(PER_RANK + "train(DDP(torch.nn.Linear(3, 11)))", "--no-track")
    assert "grew from 4 to 8 samples per step (2 ranks x 4, before 1 rank x 4)" in both.text
    assert "reference_batch=4" in both.text
    again = notebook.cell("train(DDP(torch.nn.Linear(3, 11)))", "--no-track")
    assert "learning rate" not in again.text


BY_HAND = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
def spread(model):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    {}
    return model
"""
SHARDS = BY_HAND.format("fully_shard(model, mesh=mesh)")
CUT = BY_HAND.format("parallelize_module(model, mesh, ColwiseParallel(use_local_output=False))")
IN_ROUNDS = """
model = torch.nn.Linear(3, 20)
opt = nbdist.LocalSGD(torch.optim.SGD(model.parameters(), lr=0.01), every=2)
for x in DataLoader(samples, batch_size=4):
    model(x).mean().backward(); opt.step(); opt.zero_grad()
"""


@pytest.mark.parametrize(
    ("width", "program", "is_told"),
    [
        (14, SHARDS + "train(spread(torch.nn.Linear(3, 14)))", True),
        (16, CUT + "train(spread(torch.nn.Linear(3, 16)))", False),  # both see the same samples
        (20, IN_ROUNDS, True),
    ],
    ids=["shards by hand", "tp by hand", "LocalSGD"],
)
def test_a_batch_that_grew_without_a_layout_is_told_as_well(
    notebook: Kernel, width: int, program: str, is_told: bool
) -> None:
    alone = notebook.cell(PER_RANK + f"train(torch.nn.Linear(3, {width}))", "-r 0 --no-track")
    assert alone.error is None, alone.error
    both = notebook.cell(PER_RANK + program, "--no-track")
    assert both.error is None, both.error
    assert ("grew from 4 to 8 samples per step (2 ranks x 4" in both.text) == is_told


@pytest.mark.slow
def test_a_rate_that_scale_lr_made_for_another_batch_is_told(notebook: Kernel) -> None:
    train = "train(DDP(torch.nn.Linear(3, 12)), global_batch={}, reference_batch=4)"
    right = notebook.cell(PER_RANK + train.format(8), "--no-track")
    assert right.error is None, right.error
    assert "learning rate" not in right.text
    wrong = notebook.cell(train.format(4), "--no-track")
    assert "for batches of 4 samples, and a step takes 8 (2 ranks x 4)" in wrong.text


WARM_UP = """
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
nbdist.parallelize(model, "ddp")
opt = torch.optim.SGD(model.parameters(), lr=0.01)
warmup = nbdist.scale_lr(opt, global_batch=8, reference_batch=2, warmup_steps=6)
points = nbdist.loader(torch.arange(48.).reshape(16, 3), global_batch=4)
rates, broke = [], False
"""
FOUR_STEPS = """
for x in points:
    if rank and not broke and len(rates) == 2:
        broke = True
        raise ValueError
    rates.append(opt.param_groups[0]["lr"])
    model(x).mean().backward(); opt.step(); warmup.step(); opt.zero_grad()
opt.param_groups[0]["lr"], warmup.last_epoch
"""


def test_a_warm_up_goes_on_after_a_fault_as_without_one(session: Session) -> None:
    session.run(WARM_UP)
    unbroken = session.run("broke = True" + FOUR_STEPS, track=False).value_list
    session.run(WARM_UP)
    with pytest.raises(RankError):
        session.run(FOUR_STEPS, track=False)
    assert session.retry().value_list == unbroken
    assert unbroken[0][1] == 4
    same = "nbdist.scale_lr(opt, global_batch=8, reference_batch=2, warmup_steps=6) is warmup"
    assert session.run(same).value_list == [True, True]


WEIGHTED = """
torch.manual_seed(0)
model = torch.nn.Linear(3, 13)
layout = nbdist.parallelize(model, "ddp")
opt = torch.optim.SGD(model.parameters(), lr=0.01)
points = nbdist.loader(torch.arange(48.).reshape(16, 3), global_batch=4, weights=[1, 0.3])
def loss_fn(out, _): return out.mean()
"""
PLAIN = "for x in points:\n    model(x).mean().backward(); opt.step(); opt.zero_grad()"


def test_a_plain_loop_on_unequal_parts_is_told_and_one_that_weighs_is_not(
    notebook: Kernel,
) -> None:
    told = notebook.cell(WEIGHTED + PLAIN, "--no-track").text
    assert told.count("samples of a small part count more") == 1
    for weighs in (
        PLAIN.replace("model(x).mean()", "(model(x).mean() * points.share)"),
        PLAIN.replace("model(x).mean().backward()", "layout.step(x, x, loss_fn)"),
    ):
        ran = notebook.cell(WEIGHTED + weighs, "--no-track")
        assert ran.error is None, ran.error
        assert "small part" not in ran.text


def test_a_plain_loop_whose_last_batch_is_shared_unequally_is_told_once(notebook: Kernel) -> None:
    rest = WEIGHTED.replace("weights=[1, 0.3]", "shuffle=False").replace("48.", "45.")
    rest = rest.replace("(16, 3)", "(15, 3)")
    weighed = notebook.cell(
        rest + PLAIN.replace("model(x).mean()", "points.share * model(x).mean()")
    )
    assert "some ranks had" not in weighed.text
    told = [notebook.cell(rest + PLAIN, "--no-track").text for _ in range(2)]
    assert "Of a batch of 3 samples some ranks had 2 and others 1" in told[0]
    assert "some ranks had" not in told[1]


MEASURED = """
import time
class Points(torch.utils.data.Dataset):
    def __len__(self): return 40
    def __getitem__(self, i):
        time.sleep(0.004 if rank else 0.001)
        return torch.full((3,), float(i)), i
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
layout = nbdist.parallelize(model, "ddp")
opt = torch.optim.SGD(model.parameters(), lr=1e-4)
points = nbdist.loader(Points(), global_batch=10, weights="measured")
def epoch():
    taken = []
    for x, i in points:
        layout.step(x, i, lambda out, _: out.mean()); opt.step(); opt.zero_grad()
        taken.append(i.tolist())
    return taken
"""


def test_measured_weights_give_the_slow_rank_less_and_every_sample_once(session: Session) -> None:
    session.run(MEASURED)
    session.run("for _ in range(13): epoch()", track=False)  # 52 steps: older paces are forgotten
    newest = session.run("epoch()", track=False).value_list
    fast, slow = ([len(part) for part in parts] for parts in newest)
    assert [a + b for a, b in zip(fast, slow, strict=True)] == [10] * 4
    assert fast[0] > slow[0]
    assert sorted(i for parts in newest for part in parts for i in part) == list(range(40))
    agreed = session.run("points.weights").value_list
    assert agreed[0] == agreed[1]
    assert agreed[0][0] == 1.0


RIGHT = """
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
torch.manual_seed(0)
samples = torch.arange(48.).reshape(16, 3)
def sgd(model, lr=0.01):
    return torch.optim.SGD(model.parameters(), lr=lr)
def step(model, opt, x):
    model(x).mean().backward(); opt.step(); opt.zero_grad()
"""
RIGHT_PROGRAMS = {
    "one rank": """
model = torch.nn.Linear(3, 17); opt = sgd(model)
if rank == 0:
    for x in DataLoader(samples, batch_size=4): step(model, opt, x)""",
    "the batch fixed by the loader": """
model = torch.nn.Linear(3, 17); layout = nbdist.parallelize(model, "ddp"); opt = sgd(model)
for x in nbdist.loader(samples, global_batch=4): step(model, opt, x)""",
    "the same batch in two parts": """
for i, x in enumerate(nbdist.loader(samples, global_batch=2)):
    (model(x).mean() / 2).backward()
    if i % 2: opt.step(); opt.zero_grad()""",
    "evaluation on large batches in between": """
for x in nbdist.loader(samples, global_batch=4):
    step(model, opt, x)
    with torch.no_grad():
        for y in DataLoader(samples, batch_size=16): model(y)""",
    "evaluation alone": """
with torch.no_grad():
    for y in DataLoader(samples, batch_size=16): model(y)""",
    "every rank trains by itself": """
alone = torch.nn.Linear(3, 17); opt = sgd(alone)
for x in DataLoader(samples, batch_size=8): step(alone, opt, x)""",
    "the rate scaled by hand": """
wide = DDP(torch.nn.Linear(3, 17)); opt = sgd(wide, lr=0.02)
for x in DataLoader(samples, batch_size=4): step(wide, opt, x)""",
    "the rate scaled by nbdist": """
wide = DDP(torch.nn.Linear(3, 17)); opt = sgd(wide)
warmup = nbdist.scale_lr(opt, global_batch=16, reference_batch=4, warmup_steps=2)
for x in DataLoader(samples, batch_size=8): step(wide, opt, x); warmup.step()""",
    "another model": """
other = DDP(torch.nn.Linear(3, 18)); opt = sgd(other)
for x in DataLoader(samples, batch_size=16): step(other, opt, x)""",
}


def test_right_programs_are_left_alone(notebook: Kernel) -> None:
    notebook.cell(RIGHT)
    for name, program in RIGHT_PROGRAMS.items():
        options = "-r 0 --no-track" if name == "one rank" else "--no-track"
        ran = notebook.cell(program, options)
        assert ran.error is None, (name, ran.error)
        assert "learning rate" not in ran.text, (name, ran.text)
