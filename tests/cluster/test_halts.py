"""Pause, change and peek: all ranks after the same step, or none."""

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import nbdist
from nbdist import CellResult, Session
from nbdist.client.cells import interrupts
from nbdist.client.cells.halts import Paused
from nbdist.client.tracking.past.runs import runs_table
from tests.cluster.conftest import LONGEST_S, Kernel

# Trains 20 steps. Before the steps in `at` it waits until it is asked something: who asks then
# finds all ranks after the step before, whatever the machine is busy with.
TRAIN = """
import time
from nbdist.engine.steps import halt
def wait_to_be_asked():
    while not halt.here.is_asked:
        time.sleep(0.001)
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
nbdist.parallelize(model, "ddp")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
norms = []
for step in range(1, 21):
    if step in at:
        wait_to_be_asked()
    torch.nn.functional.mse_loss(model(torch.randn(8, 4)), torch.ones(8, 1)).backward()
    optimizer.step()
    optimizer.zero_grad()
    norms.append(model.weight.norm().item())
model.weight.tolist()
"""


@contextmanager
def running(
    session: Session, code: str, params: Mapping[str, Any], **more: Any
) -> Iterator[Future[CellResult]]:
    """Run a cell on another thread within the block, which asks something of it."""
    with ThreadPoolExecutor(1) as main_thread:
        ran = main_thread.submit(session.run, code, params=params, timeout_s=LONGEST_S, **more)
        wait_for(session, ran, [at - 1 for at in params.get("at", ())[:1]] * 2)
        yield ran


def wait_for(session: Session, ran: Future[CellResult], steps: list[int]) -> None:
    """Wait until both ranks run the cell, and have made so many steps if these are given."""
    while not ran.done():
        lines = session.status().ranks
        if steps in ([], [line.step for line in lines]) and "idle" not in {
            line.state for line in lines
        }:
            return
    raise AssertionError(ran.result())


def test_a_peek_sees_the_same_step_on_all_ranks_and_the_training_goes_on(session: Session) -> None:
    with running(session, TRAIN, {"at": [5]}) as ran:
        peeked = session.peek("model.weight.norm()")
    assert peeked.step == 5
    norms = session.pull("norms")
    assert peeked.values == {rank: repr(norms[rank][4]) for rank in (0, 1)}
    assert norms[0] == norms[1]
    assert [len(one) for one in norms] == [20, 20]
    assert str(peeked).splitlines()[0] == "model.weight.norm() after step 5:"
    assert str(peeked).splitlines()[1].startswith("ranks 0-1: ")
    assert ran.result()


def test_a_peek_may_run_a_collective_and_its_error_ends_no_training(session: Session) -> None:
    with running(session, TRAIN, {"at": [3, 6]}) as ran:
        summed = session.peek("[dist.all_reduce(n := torch.ones(3) * (rank + 1)), n.tolist()][1]")
        wait_for(session, ran, [5, 5])
        raised = session.peek("1 / rank")
    assert summed.values == {0: "[3.0, 3.0, 3.0]", 1: "[3.0, 3.0, 3.0]"}
    assert (raised.values, raised.errors) == (
        {1: "1.0"},
        {0: "ZeroDivisionError: division by zero"},
    )
    assert ran.result()


def test_a_training_that_was_paused_ends_as_one_that_was_not(session: Session) -> None:
    unpaused = session.run(TRAIN, params={"at": []}).value_list
    with running(session, TRAIN, {"at": [5]}) as ran:
        assert session.pause() == Paused(5, (0, 1))
        assert [line.state for line in session.status().ranks] == ["paused at step 5"] * 2
        # There, too, values are seen at once, and random numbers are those of the training.
        assert session.peek("torch.rand(2).numel() + step").values == {0: "7", 1: "7"}
        assert [line.state for line in session.status().ranks] == ["paused at step 5"] * 2
        assert session.resume() == "Going on after step 5 on ranks 0-1."
        with pytest.raises(nbdist.ClusterError, match="No rank is paused"):
            session.resume()
    assert ran.result().value_list == unpaused


def _plain(change_after: int, lr: float) -> list[list[float]]:
    """Return the weights of the same training in one process, whose lr is set after a step."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(1, 21):
        torch.nn.functional.mse_loss(model(torch.randn(8, 4)), torch.ones(8, 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == change_after:
            optimizer.param_groups[0]["lr"] = lr
    weights: list[list[float]] = model.weight.tolist()
    return weights


def test_a_changed_lr_trains_on_all_ranks_as_one_changed_after_that_step_in_plain_torch(
    session: Session,
) -> None:
    with running(session, TRAIN, {"at": [8, 12], "alpha": 1}, run_name="changed") as ran:
        changed = session.change(lr=0.01, alpha="x")
        wait_for(session, ran, [11, 11])
        session.pause()  # so that the cell cannot end before the next line asks
        with pytest.raises(nbdist.UsageError, match=r"known here: lr, at, alpha"):
            session.change(beta=2)
        session.resume()
    assert str(changed) == "lr 0.1 -> 0.01, alpha 1 -> 'x' on ranks 0-1 after step 8."
    for weights in ran.result().value_list:
        torch.testing.assert_close(torch.tensor(weights), torch.tensor(_plain(8, 0.01)))
    assert session.pull("alpha") == ["x", "x"]
    # It is in the run, and in what the board may draw.
    assert session.trained is not None
    assert [str(one) for one in session.trained.telemetry.changes] == [
        "lr 0.1 -> 0.01 after step 8",
        "alpha 1 -> 'x' after step 8",
    ]
    table = str(runs_table(session._showing.folder))
    assert "changed by hand: lr 0.1 -> 0.01 after step 8; alpha 1 -> 'x' after step 8." in table


def test_a_cell_that_is_tried_again_has_the_parameters_as_they_were_changed(
    session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    fails = TRAIN + "\nif attempts == 0:\n    attempts = 1\n    1 / 0\nalpha"
    session.run("attempts = 0")
    at = 'globals().setdefault("begun", []).append(alpha)\n'
    with running(session, at + fails, {"at": [5], "alpha": 1}, retry=1, show=True) as ran:
        session.change(alpha=3)
        wait_for(session, ran, [4, 4])  # of the second attempt, which waits to be asked, too
        session.peek("0")
    assert ran.result().value_list == [3, 3]
    assert session.pull("begun") == [[1, 3], [1, 3]]
    assert "It begins with alpha = 3, as changed by hand." in capsys.readouterr().out


def test_ranks_that_are_steps_apart_meet_after_the_next_step_of_the_first(session: Session) -> None:
    apart = """
from nbdist.engine.steps import halt
import time
weight = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([weight], lr=1.0)
for step in range(1, 12):
    while step == (10 if rank else 4) and not halt.here.is_asked:
        time.sleep(0.001)
    weight.grad = torch.ones(1)
    optimizer.step()
"""
    session.run("from nbdist.engine.steps import halt")
    with running(session, apart, {}) as ran:
        wait_for(session, ran, [3, 9])
        peeked = session.peek("(step, weight.item())")
    assert peeked.step == 10
    assert peeked.values == {0: "(10, -10.0)", 1: "(10, -10.0)"}


def test_a_cell_that_makes_no_step_is_told_of(session: Session) -> None:
    idle = "while not done.exists(): time.sleep(0.001)"
    session.run("import pathlib, time; done = pathlib.Path('done'); done.unlink(missing_ok=True)")
    with running(session, idle, {}) as ran:
        with pytest.raises(nbdist.ClusterError) as raised:
            session.pause(timeout_s=0.3)
        (session._showing.folder.parent / "done").touch()
    assert str(raised.value).startswith(
        "Ranks 0-1 did not come to the end of step 1 within 0.3 s, so nothing was done, and all "
        "ranks go on.\nWhy: no optimizer has stepped there in this cell; rank 0: computing"
    )
    assert ran.result()


def test_a_cell_that_ends_before_the_step_is_told_of_and_without_a_cell_nothing_waits(
    session: Session,
) -> None:
    early = "ended the cell before the end of step 21"
    with running(session, TRAIN + "\nwait_to_be_asked()", {"at": []}) as ran:
        wait_for(session, ran, [20, 20])
        with pytest.raises(nbdist.ClusterError, match=early):
            session.peek("model")
    assert ran.result()
    with pytest.raises(nbdist.ClusterError, match="No cell runs on the ranks"):
        session.pause()


def test_an_interrupt_ends_a_cell_that_is_paused_and_the_ranks_are_as_they_were(
    session: Session,
) -> None:
    with running(session, TRAIN, {"at": [5]}) as ran:
        session.pause()
        assert interrupts.here.entered[-1].ask()
    with pytest.raises(KeyboardInterrupt):
        ran.result()
    (first, second) = session.run("(len(norms), model.weight.tolist())").value_list
    assert first == second
    assert first[0] == 4  # the fifth step is whole, and what follows it was not reached


def test_a_rank_that_is_killed_while_all_are_paused_is_replaced(session: Session) -> None:
    with running(session, TRAIN, {"at": [5]}) as ran:
        session.pause()
        os.kill(session.status().ranks[1].pid, signal.SIGKILL)
    with pytest.raises(nbdist.RankError, match=r"rank 1.*SIGKILL"):
        ran.result()
    first, second = session.run("model.weight.tolist()").value_list
    assert first == second
    with pytest.raises(nbdist.ClusterError, match="No cell runs"):
        session.pause()


def test_a_stop_ends_a_training_that_is_paused(session: Session) -> None:
    with running(session, TRAIN, {"at": [5]}) as ran:
        session.pause()
        session.interrupt_and_stop()
    with pytest.raises(KeyboardInterrupt):
        ran.result()
    assert not session.is_running


@pytest.mark.slow
def test_a_console_with_a_subshell_changes_the_cell_that_runs_and_a_script_tells_of_it(
    notebook: Kernel,
) -> None:
    client = notebook._client
    client.control_channel.send(client.session.msg("create_subshell_request"))
    subshell = client.control_channel.get_msg(timeout=LONGEST_S)["content"]["subshell_id"]

    def ask() -> None:
        content = {"code": "%dist change lr=0.01", "silent": False, "store_history": False}
        message = client.session.msg("execute_request", content)
        message["header"]["subshell_id"] = subshell
        client.shell_channel.send(message)

    says = TRAIN.replace("    if step in at:\n", "    if step in at:\n        print('here')\n")
    ran = notebook.cell(says, "--run steered -p at=(5,)", interrupt_after=["here"], then=ask)
    assert ran.error is None
    runs = notebook.run("%dist runs --plain").text
    assert "steered, changed by hand: lr 0.1 -> 0.01 after step 5." in runs
    (notebook.folder / "steered.py").unlink(missing_ok=True)
    assert notebook.run("%dist export steered.py").error is None
    script = (notebook.folder / "steered.py").read_text()
    assert "# lr was set to 0.01 after step 5 by hand\n" in script
    client.control_channel.send(
        client.session.msg("delete_subshell_request", {"subshell_id": subshell})
    )
    client.control_channel.get_msg(timeout=LONGEST_S)


@pytest.mark.parametrize("ask", [Session.pause, lambda session: session.peek("0")])
def test_what_is_asked_of_a_session_without_ranks_is_refused(
    session: Session, ask: Callable[[Session], object]
) -> None:
    session.stop()
    with pytest.raises(nbdist.ClusterError, match="No ranks are running"):
        ask(session)
