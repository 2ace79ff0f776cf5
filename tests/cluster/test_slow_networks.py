"""Ranks that train apart, in real cells: what a cell, a fault and a change of size leave of it."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from nbdist import Session
from nbdist.client.faults import fault_handler
from tests.cluster import test_interrupts as interrupts
from tests.cluster.conftest import Kernel
from tests.cluster.test_faults import assert_usable, fail
from tests.cluster.test_interrupts import assert_interrupted

BEGIN = """
torch.manual_seed(rank)
net = torch.nn.Linear(4, 1)
points = torch.randn(64, 4, generator=torch.Generator().manual_seed(rank))
target = points.sum(1, keepdim=True)
def weights():
    return [round(v, 12) for p in net.parameters() for v in p.detach().flatten().tolist()]
def train(opt, steps, fails_at=-1):
    for step in range(steps):
        loss = torch.nn.functional.mse_loss(net(points), target)
        loss.backward()
        if step == fails_at:
            raise ValueError("on purpose")
        opt.step()
        opt.zero_grad()
    return loss.item()
"""
ASYNC = BEGIN + "opt = nbdist.AsyncSGD(torch.optim.SGD(net.parameters(), lr=0.05){more})\n"
SERVED = """
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
opt = nbdist.AsyncSGD(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5), server=1)
def step():
    model(torch.full((1, 4), 100.0)).sum().backward()
    opt.step(); opt.zero_grad()
    opt.finish()
"""


def test_the_synchronous_and_the_asynchronous_way_train_the_same_model_in_two_cells(
    session: Session,
) -> None:
    averaging = "opt = nbdist.LocalSGD(torch.optim.SGD(net.parameters(), lr=0.05), every=1)\n"
    sync = session.run(BEGIN + averaging + "train(opt, 40)\nweights()")
    apart = session.run(
        ASYNC.format(more="") + "train(opt, 40 + 10 * rank); opt.finish()\nweights()"
    )
    assert sync.value_list[0] == sync.value_list[1]
    assert apart.value_list[0] == apart.value_list[1]
    assert sync.value_list[0] == pytest.approx([1, 1, 1, 1, 0], abs=0.2)
    assert apart.value_list[0] == pytest.approx([1, 1, 1, 1, 0], abs=0.2)
    counts = session.run("(opt.staleness.updates, len(opt.order))").value_list
    assert counts == [(90, 90), (90, 0)]


SENT = """
import time
x = torch.full((1_000_000,), float(rank))
dist.barrier()
if rank == 0:
    sent = dist.broadcast(x, 0, async_op=True)
    time.sleep(0.5)
    {more}
    raise ValueError("on purpose")
dist.broadcast(x, 0)
"""
# What is under way now comes no more.
STOP_SENDING = """
    from nbdist.engine.group import sockets, state
    from nbdist.engine.group.links import tcp_info
    place = state.here.place()
    for pair in sockets.pairs(place.address, place.peers): pair.use(lambda s: tcp_info.pace(s, 1))
"""
# 4 stages of 2 blocks: refused when rank 0's example is sent, and may not have come everywhere.
REFUSED = """
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
policy = nbdist.Pipeline("interleaved", example=torch.ones({rows}, 8))
nbdist.parallelize(model, "pp=2", policy)
"""


@pytest.fixture
def slow_link(session: Session) -> Iterator[Session]:
    """The session over 1 MB/s; each rank has a `kept` of its own."""
    session.run("nbdist.emulate_link(1e6); kept = rank + 1")
    yield session
    session.run("nbdist.emulate_link(None)")
    assert_usable(session)


def test_a_fault_amid_a_message_over_a_slow_link_lets_its_receiver_have_it(
    slow_link: Session,
) -> None:
    told = fail(slow_link, SENT.format(more=""))
    assert "1 of 2 ranks failed" in told
    assert "on purpose" in told
    assert slow_link.run("kept, x.sum().item()").value_list == [(1, 0.0), (2, 0.0)]


def test_a_layout_that_all_ranks_refuse_over_a_slow_link_costs_none_its_names(
    slow_link: Session,
) -> None:
    fail(slow_link, REFUSED.format(rows=8))  # what it imports takes longer than the message
    told = fail(slow_link, REFUSED.format(rows=80_000))
    assert "2 of 2 ranks failed" in told
    assert "ranks 0-1  cell" in told
    assert 'pp=2 by "interleaved" makes 4 stages of 2 blocks' in told
    assert slow_link.run("kept").value_list == [1, 2]


def test_a_rank_that_waits_for_the_rest_of_a_message_that_never_comes_is_ended(
    slow_link: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fault_handler, "_FREE_WITHIN_S", 1.0)
    told = fail(slow_link, SENT.format(more=STOP_SENDING.strip()))
    assert "on purpose" in told
    assert "rank 1 (localhost, cpu) died" in told
    assert "it still waited for its peers 10 s after its links were cut" in told
    assert slow_link.run("kept").value_list == [1, 1]  # rank 1's came from rank 0


@pytest.mark.slow
@pytest.mark.parametrize("breaker", [0, 1])
def test_an_exception_on_the_server_or_a_worker_ends_the_cell_and_training_goes_on(
    session: Session, breaker: int
) -> None:
    session.run(ASYNC.format(more=", max_staleness=1"))
    told = fail(session, f"train(opt, 10_000, fails_at=3 if rank == {breaker} else -1)")
    assert "ValueError: on purpose" in told
    assert_usable(session)
    after = session.run("train(opt, 20); opt.finish()\nweights()").value_list
    assert after[0] == after[1]
    assert_usable(session)


@pytest.mark.slow
def test_a_rank_that_forgets_to_finish_holds_nobody_up(session: Session) -> None:
    session.run(ASYNC.format(more=", max_staleness=1"))
    # Rank 0 serves, and has ended its cell when the other still trains.
    session.run("train(opt, 2 if rank == 0 else 30); None", timeout_s=60)
    session.run("train(opt, 30 if rank == 0 else 2)\nif rank == 0: opt.finish()", timeout_s=60)
    weights = session.run("opt.finish(); weights()", timeout_s=60).value_list
    assert weights[0] == weights[1]


@pytest.mark.slow
@pytest.mark.parametrize("stuck", ["while True: train(opt, 1)", "if rank == 0: opt.finish()"])
def test_an_interrupt_ends_asynchronous_steps_and_waits_and_training_goes_on(
    notebook: Kernel, stuck: str
) -> None:
    code = f"{ASYNC.format(more='')}print('in', flush=True)\n{stuck}\nwhile True: pass"
    assert_interrupted(notebook.cell(code, "--no-track", interrupt_after=["in"], timeout_s=60))
    interrupts.assert_usable(notebook)
    told = notebook.cell("train(opt, 5); opt.finish()\nsum(weights())", timeout_s=60).text
    assert "ranks 0-1" in told  # both say the same
    assert "Out:" in told


@pytest.mark.slow
def test_a_worker_that_dies_comes_back_and_the_server_goes_on(session: Session) -> None:
    session.run(ASYNC.format(more=""))
    session.run("train(opt, 5); opt.finish()")
    kill = "import os, signal\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
    told = fail(session, kill + "train(opt, 1); opt.finish()")
    assert "rank 1 (localhost, cpu) died" in told
    after = session.run("train(opt, 20); opt.finish()\nweights()", timeout_s=60).value_list
    assert after[0] == after[1]


@pytest.mark.slow
def test_when_the_server_dies_or_the_size_changes_it_is_said_what_to_do(session: Session) -> None:
    session.run(ASYNC.format(more=""))
    session.run("train(opt, 5); opt.finish()")
    kill = "import os, signal\nif rank == 0: os.kill(os.getpid(), signal.SIGKILL)\n"
    fail(session, kill + "train(opt, 1); opt.finish()")
    told = fail(session, "train(opt, 1)")
    assert "are lost" in told
    assert "make the optimizer again, on all ranks" in told
    session.run("opt = nbdist.AsyncSGD(opt.optim)\ntrain(opt, 5); opt.finish()", timeout_s=60)
    session.scale(3)
    told = fail(session, "train(opt, 1)")
    assert "make the optimizer again, on all ranks" in told
    session.scale(2)
    assert_usable(session)


@pytest.mark.slow
def test_a_dead_rank_of_local_sgd_comes_back_with_a_copy_and_averages_go_on(
    session: Session,
) -> None:
    wrap = "opt = nbdist.LocalSGD(torch.optim.SGD(net.parameters(), lr=0.05), every=4)\n"
    session.run(BEGIN + wrap + "train(opt, 4)")
    kill = "import os, signal\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
    told = fail(session, kill + "train(opt, 4)")
    assert re.search(r"Rank 1 was replaced", told)
    left = session.run("(opt.steps, opt.rounds.length)").value_list
    assert left[0] == left[1]
    after = session.run("opt.end_round(); train(opt, 8); opt.end_round(); weights()").value_list
    assert after[0] == after[1]
    session.scale(3)
    after = session.run("train(opt, 8); opt.end_round(); weights()", timeout_s=60).value_list
    assert after[0] == after[1] == after[2]
    session.scale(2)


@pytest.mark.slow
def test_a_restored_training_of_a_server_goes_on_from_what_was_saved(
    session: Session, tmp_path: Path
) -> None:
    folder = str(tmp_path / "saved")
    session.run(SERVED)
    saved = session.run(f"step(); nbdist.save({folder!r}).wait(); model.weight[0, 0].item()")
    session.run(SERVED)
    told = session.run(f"nbdist.restore({folder!r})").value_list[0]
    begun = session.run("opt.finish(); model.weight[0, 0].item()").value_list
    moved = session.run("step(); model.weight[0, 0].item(), opt.staleness.updates").value_list

    assert "what its server's optimizer remembers, as momentum, is not saved" in str(told)
    assert begun == saved.value_list
    for weight, updates in moved:
        assert updates == 2
        assert weight - begun[0] == pytest.approx(-2.5, rel=1e-3)  # 1, then 1 and half of the first
