"""A cell that is run again: what stands around its loops ends as without the fault, or is said."""

import itertools
from pathlib import Path

import pytest

from nbdist import RankError, Session

BEFORE = """
import pathlib
FLAG = pathlib.Path({flag!r})
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
layout = nbdist.parallelize(model, "ddp")
opt = torch.optim.SGD(model.parameters(), lr=0.1)
halving = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
data = torch.randn(40, 4, generator=torch.Generator().manual_seed(5))
train = nbdist.loader(data, global_batch=8, seed=3)
n, seen, marks, of_epochs, total = 0, 0, [], [], 0.0
def fail(at):
    if rank == 1 and at and not FLAG.exists():
        FLAG.touch()
        raise ValueError("a bad sample")
"""
STEP = """model(x).pow(2).mean().backward()
        opt.step(); opt.zero_grad(); n += 1"""
LOOPS = {
    "a scheduler, lists and counters behind each epoch": f"""
for epoch in range(4):
    for x in train:
        {STEP}
        fail(n == AT)
    halving.step(); marks.append(epoch); seen += len(data)
""",
    "while epochs are left": f"""
while train.epoch < 4:
    for x in train:
        {STEP}
        fail(n == AT)
    halving.step(); marks.append(n)
""",
    "counters that the cell sets": f"""
n, of_epochs = 0, []
for epoch in range(4):
    total = 0.0
    for x in train:
        {STEP}
        total += 1.0
        fail(n == AT)
    of_epochs.append(total)
    halving.step()
""",
    "steps counted to an end": f"""
n = 0
while n < 18:
    for x in train:
        {STEP}
        fail(n == AT)
        if n == 18:
            break
    else:
        halving.step()
""",
    "lists of tensors and of lists": f"""
of_epochs = []
for marks in [[1.5], [2.5], [3.5], [4.5]]:
    losses = []
    for x in train:
        {STEP}
        losses.append(torch.ones(2) * n)
        fail(n == AT)
    of_epochs.append(sum(loss.sum().item() for loss in losses))
    halving.step()
""",
    "a fault behind the loop": f"""
for epoch in range(4):
    for x in train:
        {STEP}
    fail(n == 5 * max(1, AT // 5))
    halving.step(); marks.append(epoch)
""",
    "a scheduler that the cell makes": f"""
halving = torch.optim.lr_scheduler.StepLR(opt, 3, 0.5)
for epoch in range(4):
    for x in train:
        {STEP}
        halving.step()
        fail(n == AT)
    marks.append(epoch)
""",
}
HELD = (
    "(n, seen, marks, of_epochs, total, halving.last_epoch, opt.param_groups[0]['lr'], "
    "[p.tolist() for p in model.parameters()])"
)


TENSORS = "lists of tensors and of lists"
# A rank that is released in the next epoch has made another list of losses: see the test below.
CASES = [
    (loop, way, at)
    for loop, way, at in itertools.product(
        LOOPS, ["--retry", "%dist retry", "a killed rank"], [3, 13, 15, 16]
    )
    if loop != TENSORS or at < 15
]


@pytest.mark.matrix
@pytest.mark.parametrize(("loop", "way", "at"), CASES)
def test_a_cell_that_continues_ends_as_without_the_fault(
    session: Session, tmp_path: Path, loop: str, way: str, at: int
) -> None:
    flag = tmp_path / "has-failed"
    before, cell = BEFORE.format(flag=str(flag)), LOOPS[loop]
    if way == "a killed rank":
        before = before.replace(
            'raise ValueError("a bad sample")', "import os; os.kill(os.getpid(), 9)"
        )
    flag.touch()
    session.run(before)
    session.run(cell, params={"AT": at}, track=False)
    unbroken = session.run(HELD).value_list
    flag.unlink()
    session.run(before)
    if way == "--retry":
        session.run(cell, params={"AT": at}, track=False, retry=1)
    else:
        with pytest.raises(RankError):
            session.run(cell, params={"AT": at}, track=False)
        session.retry()
    assert flag.exists()
    assert session.run(HELD).value_list == unbroken


def said(session: Session, before: str, cell: str, at: int = 13, **options: int) -> str:
    """Return what rank 0 says in the second attempt of a cell that fails at this step."""
    session.run(before)
    return session.run(cell, params={"AT": at}, track=False, retry=1, **options)[0].text


def test_what_is_put_back_is_named_once(session: Session, tmp_path: Path) -> None:
    before = BEFORE.format(flag=str(tmp_path / "flag"))
    text = said(session, before, LOOPS["a scheduler, lists and counters behind each epoch"])
    assert text.count("Code before and between its loops ran again") == 1
    assert "put back to where the training stood are halving, opt's options, seen, marks." in text


def test_a_list_that_a_rank_ahead_has_made_again_is_named(session: Session, tmp_path: Path) -> None:
    text = said(session, BEFORE.format(flag=str(tmp_path / "flag")), LOOPS[TENSORS], at=15)
    assert "Not as it stood, and not to be put back: losses (0 of 5 items are left)." in text


@pytest.mark.slow
def test_a_scheduler_is_where_a_checkpoint_has_put_it(session: Session, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    cell = LOOPS["a scheduler, lists and counters behind each epoch"]
    build = BEFORE.format(flag=str(flag)).replace('"ddp"', '"zero3"')
    build = build.replace('raise ValueError("a bad sample")', "__import__('os').abort()")
    held = "(halving.last_epoch, opt.param_groups[0]['lr'])"
    flag.touch()
    session.run(build + cell, params={"AT": 0}, track=False)
    unbroken = session.run(held).value_list
    flag.unlink()
    text = said(session, "1", build + cell, checkpoint=4)
    assert flag.exists()
    assert "Restored step " in text
    assert session.run(held).value_list == unbroken


def test_a_variable_that_a_loop_counts_is_named(session: Session, tmp_path: Path) -> None:
    before = BEFORE.format(flag=str(tmp_path / "flag"))
    loop = f"""
for epoch in range(4):
    for i, x in enumerate(train):
        {STEP}
        fail(n == AT)
"""
    text = said(session, before, loop)
    assert "Counted from its begin again: i. What the loop does" in text


def test_a_fixed_cell_keeps_what_it_sets(session: Session, tmp_path: Path) -> None:
    session.run(BEFORE.format(flag=str(tmp_path / "flag")))
    cell = LOOPS["counters that the cell sets"].replace("halving.step()", "")
    with pytest.raises(RankError):
        session.run(cell, params={"AT": 13}, track=False)
    fixed = cell.replace("n, of_epochs = 0, []", "n = 1000")
    text = session.run(fixed, params={"AT": 13}, track=False, go_on=True)[0].text
    assert "n was 13 and is 1000: the cell sets it before its loops." in text
    assert session.run("n").value_list == [1007] * 2


def test_a_fixed_cell_keeps_the_scheduler_that_it_makes(session: Session, tmp_path: Path) -> None:
    session.run(BEFORE.format(flag=str(tmp_path / "flag")))
    cell = LOOPS["a scheduler that the cell makes"]
    with pytest.raises(RankError):
        session.run(cell, params={"AT": 13}, track=False)
    fixed = cell.replace("StepLR(opt, 3, 0.5)", "StepLR(opt, 3, 0.25)")
    session.run(fixed, params={"AT": 13}, track=False, go_on=True)
    assert session.run("halving.gamma").value_list == [0.25] * 2


@pytest.mark.parametrize("strike", ["raise", "kill rank 0"])
def test_a_model_that_is_older_than_the_cell_that_starts_over_is_named(
    session: Session, tmp_path: Path, strike: str
) -> None:
    before = BEFORE.format(flag=str(tmp_path / "flag"))
    if strike != "raise":
        before = before.replace("rank == 1", "rank == 0").replace(
            'raise ValueError("a bad sample")', "__import__('os').abort()"
        )
    loop = f"for x in train:\n    for _ in '1':\n        {STEP}\n        fail(n == AT)\n"
    text = said(session, before, f"opt = torch.optim.SGD(model.parameters(), lr=0.1)\n{loop}", at=3)
    assert "starts over" in text
    assert "Its model is not created again, and has made 3 steps before." in text
