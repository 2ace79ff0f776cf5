"""What steps add to lists: after a fault it is there once, or its lack is said."""

import re

import pytest

from nbdist import RankError, Session

MAKE = """
torch.manual_seed(0)
net = torch.nn.Linear(3, 4)
layout = nbdist.parallelize(net, "LAYOUT")
opt = layout.optimizer(torch.optim.SGD, lr=0.1)
items = nbdist.loader(torch.arange(36.0).reshape(12, 3) / 36, global_batch=4, seed=2)
class Trainer: pass
trainer = Trainer(); trainer.outputs = []
n, has_failed, seen, history, untouched = 0, False, [], {"loss": []}, [1, 2]
def fail(place):
    global has_failed
    if place == "PLACE" and n == 4 and not has_failed and (FAILS):
        has_failed = True
        raise ValueError("planted")
"""
LOOP = """
for epoch in range(3):
    for x in items:
        trainer.outputs.append(net(x).pow(2).mean())
        trainer.outputs[-1].backward()
        fail("backward")
        opt.step(); opt.zero_grad()
        fail("step")
        seen.append(n); history["loss"].append(trainer.outputs[-1].item())
        fail("added")
        n += 1
"""
SIZES = "len(seen), len(history['loss']), len(trainer.outputs), len(untouched)"


def fail_once(session: Session, layout: str, place: str, fails: str) -> str:
    make = MAKE.replace("LAYOUT", layout).replace("PLACE", place).replace("FAILS", fails)
    session.run(make, track=False)
    with pytest.raises(RankError, match="planted") as failed:
        session.run(LOOP, track=False)
    return str(failed.value)


@pytest.mark.parametrize("layout", ["ddp", "zero3"])
@pytest.mark.parametrize("fails", ["True", "rank == 1"])
@pytest.mark.parametrize("place", ["backward", "step", "added"])
def test_what_a_step_adds_to_lists_is_there_once_or_is_said_to_lack(
    session: Session, layout: str, place: str, fails: str
) -> None:
    said = fail_once(session, layout, place, fails)
    if half := re.search(r"half done on ranks? ([01])", said):
        session.run("n += 1", ranks="1" if half[1] == "1" else "all", track=False)
    session.retry()
    lacks = re.search(r"On ranks? ([01])\S* nothing was added to history\['loss'\] and seen", said)
    for rank, found in enumerate(session.run(SIZES, track=False).value_list):
        is_short = lacks is not None and rank >= int(lacks[1])
        assert found == ((8, 8, 9, 2) if is_short else (9, 9, 9, 2)), said


def test_until_the_cell_is_run_again_lists_keep_what_the_lost_batch_added(
    session: Session,
) -> None:
    said = fail_once(session, "ddp", "backward", "True")
    assert "lists go back with the batch that is lost: trainer.outputs to 4 items." in said
    session.run("last = trainer.outputs[-1].item()", track=False)
    assert session.run(SIZES, track=False).value_list == [(4, 4, 5, 2)] * 2
    session.retry()
    assert session.run(SIZES, track=False).value_list == [(9, 9, 9, 2)] * 2


def test_what_another_training_adds_before_the_retry_stays(session: Session) -> None:
    fail_once(session, "ddp", "backward", "True")
    session.run(LOOP.replace("range(3)", "range(1)"), track=False)
    outputs = "[output.item() for output in trainer.outputs]"
    before = session.run(outputs, track=False).value_list
    session.retry()
    after = session.run(outputs, track=False).value_list
    assert [found[: len(before[0])] for found in after] == before


def test_a_snapshot_takes_back_what_steps_since_have_added(session: Session) -> None:
    make = MAKE.replace("LAYOUT", "zero3").replace("PLACE", "late").replace("FAILS", "rank == 1")
    session.run(make.replace("n == 4", "n == 8"), track=False)
    late = LOOP.replace('fail("backward")', 'fail("late")')
    with pytest.raises(RankError, match="planted"):
        session.run(late, track=False)
    session.retry()
    assert session.run(SIZES, track=False).value_list == [(9, 9, 9, 2)] * 2
