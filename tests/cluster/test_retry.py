"""A cell that makes what it trains, run again: it goes on with what is there, or starts over.

The proof: as many steps, of the same samples, and the same weights, bit by bit, as without a fault.
"""

import re
from pathlib import Path

import pytest

from nbdist import ClusterError, RankError, Session
from nbdist.client.tracking.past.runs import runs
from tests.cluster.conftest import Kernel
from tests.cluster.test_faults import fail

MAKE = """
import os, pathlib, signal
FLAG = pathlib.Path({flag!r})
globals().pop("model", None)
steps, samples = 0, []
def make_model():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 2))
    model[1].p *= {dropout}
    nbdist.parallelize(model, "ddp")
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
def make_loader():
    data = torch.randn(64, 4, generator=torch.Generator().manual_seed(5))
    data[:, 0] = torch.arange(64)
    return nbdist.loader(data / 64, global_batch=8, seed=3)
def once(fault):
    if rank == 1 and len(samples) % 32 == {at} and not FLAG.exists():
        FLAG.touch()
        if fault == "kill": os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("once")
def whole():
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
"""
LOOP = """
while train.epoch < 4:
    for x in train:
        loss = model(x).pow(2).mean()
        once({fault!r})
        loss.backward(); opt.step(); opt.zero_grad()
        samples.append(sorted((x[:, 0] * 64).round().int().tolist()))
whole(), samples[-32:]
"""
GUARD = 'if "model" not in globals(): '
# What the cell makes each time it runs, and what only where it is not there.
CELLS = {
    "all behind a guard": f"{GUARD}(model, opt), train = make_model(), make_loader()",
    "the model behind a guard": f"{GUARD}model, opt = make_model()\ntrain = make_loader()",
    "all made anew": "train = make_loader()\nnext(iter(train))\nmodel, opt = make_model()",
    "the model made anew": (
        "train = globals().setdefault('kept', make_loader())\nmodel, opt = make_model()"
    ),
}


def begin(session: Session, flag: Path, dropout: int = 1, at: int = 20) -> None:
    make = MAKE.format(flag=str(flag), dropout=dropout, at=at)
    session.run(f"globals().pop('kept', None)\n{make}")


def assert_each_sample_once_an_epoch(values: list[tuple[object, list[list[int]]]]) -> None:
    steps = [sorted(mine + other) for mine, other in zip(values[0][1], values[1][1], strict=True)]
    assert len(steps) == 32
    for epoch in range(4):
        of_epoch = steps[8 * epoch : 8 * epoch + 8]
        assert sorted(sample for step in of_epoch for sample in step) == list(range(64))


@pytest.mark.parametrize(
    "makes",
    [
        "all made anew",
        pytest.param("all behind a guard", marks=pytest.mark.slow),
        pytest.param("the model behind a guard", marks=pytest.mark.slow),
        pytest.param("the model made anew", marks=pytest.mark.slow),
    ],
)
def test_a_cell_that_makes_what_it_trains_ends_as_without_a_fault(
    session: Session, tmp_path: Path, makes: str
) -> None:
    cell = f"{CELLS[makes]}\n{LOOP.format(fault='raise')}"
    begin(session, tmp_path)
    unbroken = session.run(cell, track=False).value_list
    assert_each_sample_once_an_epoch(unbroken)

    begin(session, tmp_path / "by itself")
    assert session.run(cell, track=False, retry=1).value_list == unbroken

    begin(session, tmp_path / "asked for")
    fail(session, cell)
    assert session.retry().value_list == unbroken


# Before the first step, what a guard keeps starts over as well.
@pytest.mark.slow
@pytest.mark.parametrize(
    "makes", ["all behind a guard", pytest.param("all made anew", marks=pytest.mark.slow)]
)
def test_a_cell_struck_before_its_first_step_ends_as_without_a_fault(
    session: Session, tmp_path: Path, makes: str
) -> None:
    cell = f"{CELLS[makes]}\n{LOOP.format(fault='raise')}"
    begin(session, tmp_path)
    unbroken = session.run(cell, track=False).value_list

    begin(session, tmp_path / "by itself", at=0)
    assert session.run(cell, track=False, retry=1).value_list == unbroken

    begin(session, tmp_path / "asked for", at=0)
    fail(session, cell)
    assert session.retry().value_list == unbroken

    begin(session, tmp_path / "by hand", at=0)
    fail(session, cell)
    assert session.run(cell, track=False).value_list == unbroken


# The other is tested above with a fault that kills nobody.
@pytest.mark.parametrize(
    "makes", ["all behind a guard", pytest.param("all made anew", marks=pytest.mark.slow)]
)
def test_a_cell_that_makes_what_it_trains_ends_as_without_a_killed_rank(
    session: Session, tmp_path: Path, makes: str
) -> None:
    cell = f"{CELLS[makes]}\n{LOOP.format(fault='kill')}"
    begin(session, tmp_path, dropout=0)  # the new process draws other random numbers
    unbroken = session.run(cell, track=False).value_list

    begin(session, tmp_path / "killed", dropout=0)
    again = session.run(cell, track=False, retry=1).value_list

    assert (tmp_path / "killed").exists(), "the rank was never killed"
    assert [weights for weights, _ in again] == [weights for weights, _ in unbroken]
    # What the killed rank had noted of its last step may have come from the other one.
    assert again[0][1] == unbroken[0][1]


TURNS = """
if "model" not in globals(): (model, opt), train = make_model(), make_loader()
while train.epoch < {until}:
    for i in (0, 2): model[i].requires_grad_(i // 2 == train.epoch % 2)
    for x in train:
        once({fault!r})
        model(x).pow(2).mean().backward(); opt.step(); opt.zero_grad()
        samples.append(sorted((x[:, 0] * 64).round().int().tolist()))
whole(), samples[-32:]
"""
# A rank dies where the other has thawed a layer, and has not trained it yet.
DEATH = """
for i in (0, 2): model[i].requires_grad_(i == 0)
if rank == 1: os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
"""


@pytest.mark.slow
def test_a_fault_where_layers_are_frozen_and_thawed_ends_as_without_one(
    session: Session, tmp_path: Path
) -> None:
    begin(session, tmp_path, dropout=0)
    unbroken = session.run(TURNS.format(until=4, fault=""), track=False).value_list
    assert unbroken[0][0] == unbroken[1][0]

    begin(session, tmp_path / "raised", dropout=0, at=16)
    cell = TURNS.format(until=4, fault="raise")
    assert session.run(cell, track=False, retry=1).value_list == unbroken

    begin(session, tmp_path, dropout=0)
    session.run(TURNS.format(until=2, fault=""), track=False)
    fail(session, DEATH)
    again = session.run(TURNS.format(until=4, fault=""), track=False).value_list
    assert [weights for weights, _ in again] == [weights for weights, _ in unbroken]


DRAWS = """
import random, numpy
if "model" not in globals():
    model, opt = make_model()
    random.seed(rank); numpy.random.seed(rank)
    train = make_loader()
draws = lambda: (torch.rand(()).item(), random.random(), numpy.random.rand())
while train.epoch < 4:
    draws()  # between epochs
    for x in train:
        once({fault!r})
        x += sum(draws()) / 10
        model(x).pow(2).mean().backward(); opt.step(); opt.zero_grad()
        samples.append(draws())  # between a step and the next batch
whole(), samples[-32:]
"""


@pytest.mark.parametrize(
    "at", [20, pytest.param(16, marks=pytest.mark.slow)]
)  # in the midst of an epoch, and at its first batch
def test_random_numbers_drawn_around_steps_are_drawn_once(
    session: Session, tmp_path: Path, at: int
) -> None:
    cell = DRAWS.format(fault="raise")
    begin(session, tmp_path)
    unbroken = session.run(cell, track=False).value_list

    begin(session, tmp_path / "by itself", at=at)
    assert session.run(cell, track=False, retry=1).value_list == unbroken
    assert (tmp_path / "by itself").exists(), "the rank has never failed"


# What two loaders give, of 6 and 3 steps an epoch, trains one model or two.
LOADERS = """
torch.manual_seed(0)
seen, bad = [], {bad}
def make_net():
    net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Dropout(0.2), torch.nn.Linear(4, 1))
    nbdist.parallelize(net, "ddp")
    return net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
one = make_net()
two = make_net() if {are_apart} else one
data = torch.arange(96.0)[:, None].repeat(1, 2) / 96
first, second = nbdist.loader(data, global_batch=16), nbdist.loader(data, global_batch=32)
def learn(net, x, name):
    global bad
    model, opt = net
    model(x).pow(2).mean().backward()
    if bad == (name, sum(told == name for told, _ in seen)) and {who}:
        bad = None
        raise ValueError("once")
    opt.step(); opt.zero_grad()
    seen.append((name, (x[:, 0] * 96).round().int().tolist()))
def ends():
    weights = [p.flatten().tolist() for model, _ in (one, two) for p in model.parameters()]
    # Rank 1 does not note a step that it copies from rank 0.
    return seen if rank == 0 else None, first.epoch, second.epoch, weights
"""
# Each with the step that fails: so many of its name were made before.
LOADERS_LOOPS: dict[str, tuple[str, tuple[str, int]]] = {
    "one after the other": ("{A}\n{B}", ("b", 1)),
    "three": ("{A}\n{B}\n{A}\n{B}", ("a", 8)),
    "made by the cell": ("{MAKE}\n{A}\n{B}\n{A}", ("b", 1)),
    "the first left": (
        "for i, x in enumerate(first):\n    if i == 4: break\n    {LEARN}\n{B}\n{A}",
        ("b", 1),
    ),
    "in turns": ("for epoch in range(3):\n    {A}\n    {B}", ("b", 4)),
    "in turns until an epoch": ("while second.epoch < 3:\n    {A}\n    {B}", ("a", 14)),
    "side by side": ("for epoch in range(3):\n    {BOTH}", ("a", 4)),
}


def loops_of(kind: str) -> str:
    loops = LOADERS_LOOPS[kind][0].format(
        A="for x in first: learn(one, x, 'a')",
        B="for x in second: learn(two, x, 'b')",
        BOTH="for x, y in zip(first, second): learn(one, torch.cat((x, y)), 'a')",
        LEARN="learn(one, x, 'a')",
        MAKE="first, second = (nbdist.loader(data, global_batch=size) for size in (16, 32))",
    )
    return f"{loops}\nends()"


@pytest.mark.parametrize("who", ["True", "rank == 1"])
@pytest.mark.parametrize("are_apart", [False, True])
@pytest.mark.parametrize("loops", LOADERS_LOOPS)
def test_loops_over_two_loaders_end_as_without_a_fault(
    session: Session, loops: str, are_apart: bool, who: str
) -> None:
    cell, bad = loops_of(loops), LOADERS_LOOPS[loops][1]
    session.run(LOADERS.format(bad="None", who="True", are_apart=are_apart))
    unbroken = session.run(cell, track=False).value_list
    session.run(LOADERS.format(bad=bad, who=who, are_apart=are_apart))
    fail(session, cell, track=False)
    assert session.retry().value_list == unbroken


def test_loops_over_two_loaders_end_as_without_faults_that_follow_each_other(
    session: Session,
) -> None:
    cell = loops_of("made by the cell")
    session.run(LOADERS.format(bad="None", who="True", are_apart=True))
    unbroken = session.run(cell, track=False).value_list
    session.run(LOADERS.format(bad=("b", 1), who="True", are_apart=True))
    fail(session, cell, track=False)
    session.run("bad = ('b', 2)", track=False)
    with pytest.raises(RankError):
        session.retry()
    session.run("bad = ('a', 9)", track=False)
    with pytest.raises(RankError):
        session.retry()
    assert session.retry().value_list == unbroken


@pytest.mark.slow
def test_a_loop_that_evaluates_leaves_the_training_around_it_as_without_a_fault(
    session: Session,
) -> None:
    cell = """
for epoch in range(3):
    for x in first: learn(one, x, 'a')
    found = []
    one[0].eval()
    with torch.no_grad():
        for x in second:
            one[0](x); found.append(x[:, 0].tolist())
            if bad == ('look', epoch) and rank == 1: bad = None; 1 / 0
    one[0].train()
    assert len(found) == 3
ends()[0], first.epoch, ends()[-1]
"""
    session.run(LOADERS.format(bad="None", who="True", are_apart=False))
    unbroken = session.run(cell, track=False).value_list
    for bad in (("a", 8), ("look", 1)):  # in the second epoch
        session.run(LOADERS.format(bad=bad, who="rank == 1", are_apart=False))
        fail(session, cell, track=False)
        assert session.retry().value_list == unbroken, bad


AUGMENTED = """
import random
import numpy as np
class Augmented(torch.utils.data.Dataset):
    def __len__(self): return 32
    def __getitem__(self, i):
        return torch.full((4,), float(i)) + random.random() + np.random.rand() + torch.rand(())
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
nbdist.parallelize(model, "ddp")
opt = torch.optim.SGD(model.parameters(), lr=1e-3)
train = nbdist.loader(Augmented(), global_batch=8, seed=3, num_workers={workers})
is_to_fail = {fails} and rank == 1
"""
AUGMENTED_LOOP = """
while train.epoch < 2:
    for x in train:
        model(x).sum().backward()
        if is_to_fail and train.consumed == 24:
            is_to_fail = False
            1 / 0
        opt.step(); opt.zero_grad()
model.weight.tolist()
"""


@pytest.mark.slow
def test_what_workers_draw_is_after_a_fault_what_it_would_have_been(session: Session) -> None:
    ends = []
    for workers, fails in ((1, False), (1, True), (2, True)):
        session.run(AUGMENTED.format(workers=workers, fails=fails))
        if fails:
            fail(session, AUGMENTED_LOOP)
            ends.append(session.retry().value_list)
        else:
            ends.append(session.run(AUGMENTED_LOOP, track=False).value_list)
    assert ends == [ends[0]] * 3


PLAIN = """
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.arange(32.0)[:, None])
sampler = torch.utils.data.DistributedSampler(data)
plain, ours = DataLoader(data, 4, sampler=sampler), nbdist.loader(data, global_batch=8)
torch.manual_seed(0)
model = torch.nn.Linear(1, 1)
nbdist.parallelize(model, "ddp")
opt = torch.optim.SGD(model.parameters(), lr=1e-6)
is_to_fail = True
"""
# The fault comes in the third step.
PLAIN_LOOP = """
with torch.no_grad():
    for x, in plain: model(x)
done = 0
for epoch in range(2):
    for x, in {loader}:
        if {fails}: is_to_fail = False; 1 / 0
        model(x).sum().backward(); opt.step(); opt.zero_grad(); done += 1
"""


WHEN = "is_to_fail and done == 2 and rank == 1"


@pytest.mark.slow
def test_a_loop_without_a_loader_of_ours_that_begins_anew_says_so_once(session: Session) -> None:
    def told(loader: str, fails: str = WHEN) -> list[str]:
        session.run(PLAIN)
        loop = PLAIN_LOOP.format(loader=loader, fails=fails)
        fail(session, loop)
        text = session.retry()[0].text
        return [line for line in text.splitlines() if "again, with the model of step" in line]

    (line,) = told("plain")
    assert "The loop over plain (a DataLoader) begins" in line
    assert "again, with the model of step 2:" in line
    (line,) = told("DataLoader(data, 4)")
    assert "The loop over a DataLoader begins" in line
    (line,) = told("((x,) for x in torch.ones(8, 4, 1))")
    assert line == (
        "The cell runs from its first line again, with the model of step 2: only a loop over "
        "nbdist.loader is continued where it stopped."
    )
    assert told("ours") == []
    # The newest batch is another loader's, of which nothing is trained.
    assert told("ours", f"[model(v) for v, in plain] and {WHEN}") == []
    assert told("plain", "is_to_fail and rank == 1") == []  # no step was made


def test_a_retry_names_the_cell_that_it_runs_again(notebook: Kernel, tmp_path: Path) -> None:
    notebook.run(f"flag = {str(tmp_path / 'flag')!r}\n%dist push flag")
    failed = notebook.cell("\n# a comment\nn = 1\nopen(flag).close(); n", "--no-track")
    assert failed.error is not None
    (number,) = re.findall(r"cell (\d+), line 5", failed.error[1])
    notebook.cell("'went well'", "--no-track")
    (tmp_path / "flag").touch()
    said = notebook.run("%dist retry").text
    assert said == f"Running cell {number} again: n = 1\nranks 0-1 │ Out: 1"


@pytest.mark.slow
def test_a_cell_that_left_loops_says_what_lets_it_go_on_also_when_mended(
    session: Session, tmp_path: Path
) -> None:
    cell = DRAWS.format(fault="raise")
    begin(session, tmp_path)
    unbroken = session.run(cell, track=False).value_list

    begin(session, tmp_path / "mended", at=20)
    assert "With %%distributed --go-on the cell's loops continue" in fail(session, cell)
    assert "NameError" in fail(session, "a_typo_of_who_looks_around")
    mended = cell.replace("once('raise')", "pass")
    assert session.run(mended, track=False, go_on=True).value_list == unbroken
    with pytest.raises(ClusterError, match="nothing to retry"):
        session.retry()


@pytest.mark.slow
def test_what_a_cell_that_is_run_again_says_is_what_it_does(
    notebook: Kernel, tmp_path: Path
) -> None:
    def said(makes: str) -> tuple[str, int]:
        flag = str(tmp_path / makes.replace(" ", "-"))
        notebook.cell(f"globals().pop('kept', None)\n{MAKE.format(flag=flag, dropout=1, at=20)}")
        cell = f"print('begun')\n{CELLS[makes]}\n{LOOP.format(fault='raise')}; None"
        ran = notebook.cell(cell, "--retry 1")
        assert ran.error is None, ran.error
        newest = runs(notebook.folder / ".nbdist")[0]
        assert newest.attempt == 2
        return ran.text, newest.steps

    (continues, steps_of_both), (starts_over, steps_of_one) = map(
        said, ("all behind a guard", "all made anew")
    )
    assert (steps_of_both, steps_of_one) == (32, 32)  # a fault had followed the 20th

    assert "The cell continues: its loader is at sample 32 of epoch 2." in continues
    assert "starts over" not in continues
    assert "The cell starts over: it creates its optimizer again" in starts_over
    assert "continues" not in starts_over
    # The attempt that came to nothing is not shown.
    assert [text.count("begun") for text in (continues, starts_over)] == [2, 2]


SHARDED = """
bad = {is_struck}
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
layout = nbdist.parallelize(model, "zero3")
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
data = torch.randn(64, 4, generator=torch.Generator().manual_seed(5))
train = nbdist.loader(data, global_batch=8, seed=3)
"""
EPOCHS = """
while train.epoch < {end}:
    for x in train:
        model(x).pow(2).mean().backward()
        if rank == 1 and train.epoch == 2 and bad: bad = False; raise ValueError("once")
        opt.step(); opt.zero_grad()
train.epoch, torch.cat([p.to_local().flatten() for p in model.parameters()]).tolist()
"""


@pytest.mark.slow
def test_a_cell_goes_back_as_far_on_the_rank_that_made_no_step_in_it(session: Session) -> None:
    ends = []
    for is_struck in (False, True):
        session.run(SHARDED.format(is_struck=is_struck))
        session.run(EPOCHS.format(end=2), track=False)
        # Rank 0 makes a step that rank 1 does not: all go back to the first step's snapshot.
        cell = session.run(EPOCHS.format(end=3), retry=1, track=False, timeout_s=60)
        ends.append(cell.value_list)
        assert session.run("bad").value_list == [is_struck, False]
    assert ends[0] == ends[1]
    assert [epoch for epoch, _ in ends[1]] == [3, 3]
    session.run("del layout, model, opt, train")  # later tests tell what is lost with a rank


def test_a_rank_that_left_the_loop_draws_its_random_numbers_again(
    session: Session, tmp_path: Path
) -> None:
    """The cell ended well there, and failed on the rank that waited for it."""
    session.run(
        f"import pathlib; FLAG = pathlib.Path({str(tmp_path / 'left')!r}); drawn = []\n"
        "net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))\n"
        "sgd = torch.optim.SGD(net.parameters(), lr=0.1); torch.manual_seed(3)"
    )
    loop = (
        "for i in range(3):\n"
        "    drawn.append(torch.rand(1).item())\n"
        "    if rank == 0 and i == 1 and not FLAG.exists():\n"
        "        FLAG.touch(); break\n"
        "    net(torch.full((1, 1), drawn[-1])).sum().backward(); sgd.step(); sgd.zero_grad()"
    )
    assert "rank 0 has finished the cell" in fail(session, loop, track=False)
    session.retry()
    first, second = session.run("drawn", track=False).value_list
    assert first == second
    assert len(first) == 5
    assert first[2] == first[1]  # of the step that was lost


@pytest.mark.slow
def test_coverage_names_the_cell_of_a_loader_by_its_prompt(notebook: Kernel) -> None:
    notebook.run("1 + 1")  # a cell that runs on no rank
    made = notebook.cell("prompted = nbdist.loader(list(range(8)), global_batch=4); print('made')")
    assert made.error is None
    prompt = int(notebook.run("len(In) - 2").text)
    told = notebook.cell("for _ in prompted: pass\nnbdist.coverage()")
    assert f"prompted (cell {prompt})" in told.text
    loop = "for _ in nbdist.loader(list(range(8)), global_batch=4): pass\n"
    told = notebook.cell(f"{loop}{loop}nbdist.coverage()")
    assert re.findall(r"loader (\d) \(cell", told.text)[-2:] == ["1", "2"]
    told = notebook.cell("print(nbdist.coverage().is_exact)")
    assert "True" in told.text
    assert "epoch" not in told.text  # the table is shown where it is asked for
    outside = notebook.run("import nbdist; nbdist.coverage()").error
    assert outside is not None
    assert "nbdist.coverage is for ranks, and this cell runs in the notebook" in outside[1]
