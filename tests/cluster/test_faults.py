"""What a fault costs: one error that names its cause, and no more; the group works afterwards."""

import re
from pathlib import Path
from typing import Any

import pytest

from nbdist import ClusterError, RankError, Session

SUM = "_s = torch.full((3,), rank + 1.0); dist.all_reduce(_s); _s.tolist()"


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def fail(session: Session, code: str, **more: Any) -> str:
    """Run a cell that must fail; return the error's text."""
    with pytest.raises(RankError) as caught:
        session.run(code, timeout_s=60, **more)
    return plain(str(caught.value))


def assert_usable(session: Session) -> None:
    assert session.run(SUM, timeout_s=30).value_list == [[3.0] * 3] * 2


# What a cell may raise


def test_a_traceback_shows_the_cells_own_lines(session: Session) -> None:
    told = fail(session, "def inner(x):\n    return 1 / x\n\nfor x in [1, 0]:\n    inner(x)")
    assert "line 2  ZeroDivisionError: division by zero" in told
    assert "----> 5     inner(x)" in told
    assert "----> 2     return 1 / x" in told
    assert "nbdist/" not in told


_MODULE = """
import torch
from torch import nn

class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
    def forward(self, x):
        h = self.up(x).view(len(x), 4, 4)  # of the whole
        return self.down(h.flatten(1))

class Asking(Heads):
    def forward(self, x):
        if x.sum() > 0:  # a number
            return self.down(self.up(x))
        return x

def check(step):
    raise ValueError("a loss of nan")
"""


@pytest.mark.parametrize("folder", ["nbdist", "nbdist/engine", "torch", "my work/site-packages"])
def test_a_line_of_the_users_own_is_named_whatever_its_folder_is_called(
    folder: str, session: Session, tmp_path: Path
) -> None:
    (tmp_path / folder).mkdir(parents=True)
    module = "train_in_" + re.sub(r"\W", "_", folder)
    file = tmp_path / folder / f"{module}.py"
    file.write_text(_MODULE)
    use = f"import sys; sys.path.insert(0, {str(file.parent)!r}); import {module} as train\n"

    told = fail(session, use + "train.check(1)")
    assert f"{file.name}, line 20  ValueError: a loss of nan" in told
    assert 'raise ValueError("a loss of nan")' in told  # its frame is shown

    plan = "nbdist.TensorParallel(example=torch.ones(2, 8), plan=dict(up='column', down='row'))"
    told = fail(session, f"nbdist.parallelize(train.Heads(), 'tp=2', {plan})")
    assert f"line 10 of {file}, h = self.up(x).view(len(x), 4, 4)" in told
    told = fail(session, "nbdist.parallelize(train.Asking(), 'tp=2')")
    assert f"line 15 of {file}, if x.sum() > 0:" in told


def test_the_cause_of_an_exception_is_told_too(session: Session) -> None:
    told = fail(
        session, "try:\n    {}['k']\nexcept KeyError as e:\n    raise ValueError('v') from e"
    )
    assert "KeyError: 'k'" in told
    assert "direct cause" in told
    assert "ValueError: v" in told


def test_sys_exit_fails_the_cell_and_ends_no_rank(session: Session) -> None:
    for code in ("import sys; sys.exit(3)", "raise SystemExit(3)"):
        assert "called sys.exit(3)" in fail(session, code)
    assert_usable(session)


@pytest.mark.parametrize("word", ["exit()", "quit()", "exit", "quit"])
def test_exit_and_quit_say_what_to_do_and_end_no_rank(session: Session, word: str) -> None:
    session.run("held = rank")
    assert "%dist stop" in fail(session, word)
    assert session.run("held").value_list == [0, 1]
    assert_usable(session)


def test_an_exception_that_cannot_be_printed_is_still_told(session: Session) -> None:
    code = """
class Odd(Exception):
    def __str__(self): raise ValueError("no text")
    __repr__ = __str__
raise Odd
"""
    fail(session, code)
    assert_usable(session)


def test_a_deep_recursion_is_told_in_few_lines(session: Session) -> None:
    told = fail(session, "def f(n): return f(n + 1)\nf(0)")
    assert "RecursionError" in told
    assert len(told.splitlines()) < 150
    assert "frames of" in told or "not shown" in told


def test_a_huge_message_is_cut(session: Session) -> None:
    told = fail(session, "raise ValueError('x' * 10_000_000)")
    assert "ValueError: xxx" in told
    assert len(told) < 20_000


def test_an_exception_group_shows_its_parts(session: Session) -> None:
    told = fail(session, "raise ExceptionGroup('both', [ValueError('a'), TypeError('b')])")
    assert "ExceptionGroup: both" in told


def test_ranks_that_fail_alike_are_told_once(session: Session) -> None:
    told = fail(session, "raise ValueError('same')")
    assert "2 of 2 ranks failed" in told
    assert told.count("----> 1") == 1
    assert "ranks 0-1" in told


def test_ranks_that_fail_otherwise_are_told_each(session: Session) -> None:
    told = fail(session, "raise [ValueError, KeyError][rank]('mine')")
    assert "ValueError: mine" in told
    assert "KeyError: 'mine'" in told


def test_the_failed_ranks_and_their_errors_can_be_read_by_a_script(session: Session) -> None:
    with pytest.raises(RankError) as caught:
        session.run("if rank == 1: raise ValueError('one')\nrank")
    assert caught.value.failures == {1: ("ValueError", "one")}
    assert session.last is not None
    assert not session.last.ok
    assert session.last[0].value == 0
    assert session.last[1].error == ("ValueError", "one")


def test_a_keyboard_interrupt_that_a_cell_raises_itself_is_its_error(session: Session) -> None:
    told = fail(session, "if rank == 0: raise KeyboardInterrupt\ndist.barrier()")
    assert told.startswith("1 of 2 ranks failed")
    assert "rank 0 (localhost, cpu)" in told
    assert "KeyboardInterrupt" in told
    assert_usable(session)


# One rank raises, the others wait

ABSENT = {
    "all_reduce": "dist.all_reduce(torch.ones(4))",
    "barrier": "dist.barrier()",
    "a work's wait": "dist.all_reduce(torch.ones(4), async_op=True).wait()",
    "broadcast": "dist.broadcast(torch.ones(4), src=0)",
    "all_gather": "dist.all_gather([torch.ones(4) for _ in range(2)], torch.ones(4))",
    "recv": "dist.recv(torch.ones(4), src=0)",
    "all_gather_object": "dist.all_gather_object([None, None], {'x': 1})",
    "a functional collective": (
        "import torch.distributed._functional_collectives as fc\n"
        "print(fc.all_reduce(torch.ones(4), 'sum', dist.group.WORLD))"
    ),
    "a group of its own": "dist.all_reduce(torch.ones(4), group=pair)",
}
# They wait for the root and for parts as "all_reduce" waits for a sum.
SLOW = ("broadcast", "all_gather", "all_gather_object")


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(call, id=name, marks=(pytest.mark.slow,) if name in SLOW else ())
        for name, call in ABSENT.items()
    ],
)
def test_a_rank_that_waits_for_one_that_raised_is_freed(session: Session, call: str) -> None:
    session.run("kept = torch.arange(3) + rank; pair = dist.new_group([0, 1])")
    told = fail(session, f"if rank == 0:\n    raise IndexError('mine')\n{call}")
    assert told.startswith("1 of 2 ranks failed; rank 1 was released while waiting in")
    assert "IndexError: mine" in told
    assert "Connection closed" not in told
    assert "re-created" in told
    assert_usable(session)
    assert session.run("kept.tolist()").value_list == [[0, 1, 2], [1, 2, 3]]
    assert session.run(
        "t = torch.ones(1); dist.all_reduce(t, group=pair); t.item()"
    ).value_list == [2.0, 2.0]


def test_a_collective_that_only_one_rank_launched_does_not_shift_the_next(
    session: Session,
) -> None:
    # Rank 1 launches and does not wait; nothing fails on it.
    fail(
        session, "if rank == 0: raise ValueError\nw = dist.all_reduce(torch.ones(1), async_op=True)"
    )
    assert_usable(session)


def test_many_faults_in_a_row_cost_no_rank(session: Session) -> None:
    before = [line.pid for line in session.status().ranks]
    for turn in range(4):
        fail(session, f"if rank == {turn % 2}: raise ValueError\ndist.all_reduce(torch.ones(1))")
    assert_usable(session)
    assert [line.pid for line in session.status().ranks] == before


TRAIN = """
from torch.nn.parallel import DistributedDataParallel as DDP
def make():
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    return model
def data(step):
    g = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, 6, generator=g), torch.randn(8, 3, generator=g)
def steps(model, opt, numbers):
    for n in numbers:
        x, y = data(n)
        opt.zero_grad()
        (model(x) - y).pow(2).mean().backward()
        opt.step()
def whole(model):
    parts = []
    for p in model.parameters():
        p = p.full_tensor() if hasattr(p, "full_tensor") else p
        parts += p.detach().flatten().tolist()
    return parts
"""

WRAPS = {
    "a user's DDP": "m = make(); m = DDP(m)",
    "parallelize ddp": "m = make(); nbdist.parallelize(m, 'ddp')",
    "parallelize zero3": "m = make(); nbdist.parallelize(m, 'zero3')",
}


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
@pytest.mark.parametrize("where", ["forward", "backward", "step"])
def test_training_after_a_fault_is_bit_equal_to_an_unbroken_run(
    session: Session, wrap: str, where: str
) -> None:
    session.run(TRAIN)
    begin = f"{wrap}; o = torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)"
    clean = session.run(f"{begin}; steps(m, o, range(6)); whole(m)", track=False).value_list
    fault = {
        "forward": "m(data(9)[0]) if rank else 1 / 0",
        "backward": "l = m(data(9)[0]).sum()\nif not rank: 1 / 0\nl.backward()",
        "step": "steps(m, o, range(0)); dist.barrier() if rank else 1 / 0",
    }[where]
    session.run(f"{begin}; steps(m, o, range(3))", track=False)
    if where == "forward" and "DDP" in wrap:
        fault += "\ndist.barrier()"  # a plain DDP's forward waits for nobody
    told = fail(session, fault + "\ndist.barrier()", track=False)
    assert "ZeroDivisionError" in told
    broken = session.run("o.zero_grad(); steps(m, o, range(3, 6)); whole(m)", track=False)
    assert broken.value_list == clean


# Time


def test_a_timeout_ends_the_cell_and_nothing_else(session: Session) -> None:
    session.run("held = rank")
    with pytest.raises(ClusterError, match=r"longer than its --timeout of 0.5 s"):
        session.run("import time\nwhile True: time.sleep(0.01)", timeout_s=0.5)
    with pytest.raises(ClusterError, match=r"--timeout"):
        # Rank 0 goes on: that rank 1 waits for ever is no finding that could come first.
        session.run("import time\ndist.barrier() if rank else time.sleep(60)", timeout_s=0.5)
    assert session.run("held").value_list == [0, 1]
    assert_usable(session)


def test_a_new_rank_trains_with_one_that_stayed(session: Session) -> None:
    session.run(TRAIN)
    session.restart("1")
    session.run(TRAIN, ranks="1")
    begin = "m = DDP(make()); o = torch.optim.SGD(m.parameters(), lr=0.1)"
    first, second = session.run(f"{begin}; steps(m, o, range(2)); whole(m)", track=False).value_list
    assert first == second


def test_an_error_of_nbdists_own_names_the_line_of_the_cell_that_caused_it(
    session: Session,
) -> None:
    cell = "model = torch.nn.Linear(2, 2)\n\nnbdist.parallelize(model, 'tp=3')"
    told = fail(session, cell, prompt=7)
    assert "ranks 0-1  cell 7, line 3  LayoutError: tp=3 needs 3 ranks" in told
    assert "Traceback" not in told
    assert "File " not in told


# Collectives that cannot meet


def test_collectives_that_cannot_meet_name_both_sides_and_cost_nothing(session: Session) -> None:
    before = [line.pid for line in session.status().ranks]
    session.run("kept = rank + 40")
    told = fail(session, "n = 1000 + rank\nx = torch.ones(n)\n\ndist.all_reduce(x)", prompt=7)
    assert "Collective #" in told
    assert "of the default group (ranks 0-1) differs between ranks." in told
    assert "all_reduce of 1,000 float32 (4.0 kB), cell 7, line 4" in told
    assert "all_reduce of 1,001 float32 (4.0 kB), cell 7, line 4" in told
    assert told.count("Why: rank 0 calls") == 1
    assert_usable(session)
    assert session.run("kept").value_list == [40, 41]
    assert [line.pid for line in session.status().ranks] == before


def test_a_mismatch_in_backward_is_an_error_like_any_other(session: Session) -> None:
    session.run(TRAIN)
    wrap = "m = DDP(make(), find_unused_parameters=True, bucket_cap_mb=[25, 0.0003][rank])"
    told = fail(session, f"{wrap}\nm(data(0)[0]).sum().backward()")
    assert "differs between ranks." in told
    assert "all_reduce of" in told
    assert_usable(session)


def test_messages_alone_do_not_unsettle_the_groups(session: Session) -> None:
    session.run("dist.send(torch.ones(2), 1) if rank == 0 else dist.recv(torch.ones(2), 0)")
    assert "re-created" not in fail(session, "1 / 0")


def test_a_message_that_nobody_took_is_not_taken_for_the_next_one(session: Session) -> None:
    told = fail(session, "w = dist.isend(torch.ones(2), 1) if rank == 0 else 1 / 0")
    assert "re-created" in told
    assert (
        session.run(
            "t = torch.full((2,), 7.0) if rank == 0 else torch.zeros(2)\n"
            "dist.send(t, 1) if rank == 0 else dist.recv(t, 0)\nt.tolist()"
        ).value_list
        == [[7.0, 7.0]] * 2
    )


def test_ranks_that_all_fail_in_the_midst_of_backward_train_on(session: Session) -> None:
    session.run(TRAIN)
    session.run("m = DDP(make()); o = torch.optim.SGD(m.parameters(), lr=0.1)")
    broken = (
        "def fail(*_): raise ValueError('planted')\n"
        "handle = next(m.parameters()).register_hook(fail)\n"
        "try: steps(m, o, range(1))\n"
        "finally: handle.remove()"
    )
    assert "planted" in fail(session, broken)
    session.run("steps(m, o, range(2))", track=False)


def test_a_rank_that_fails_between_backward_and_step_gets_the_step(session: Session) -> None:
    session.run(TRAIN)
    session.run("m = DDP(make()); o = torch.optim.SGD(m.parameters(), lr=0.1)")
    session.run("steps(m, o, range(1))", track=False)
    told = fail(
        session,
        "o.zero_grad(); m(data(1)[0]).sum().backward()\n"
        "if rank == 1: raise ValueError('before the step')\n"
        "o.step()",
    )
    assert "Rank 1 had lost" in told
    first, second = session.run("whole(m)").value_list
    assert first == second


def test_a_seed_set_by_a_cell_that_fails_stays_set(session: Session) -> None:
    session.restart()  # what other tests have trained would go back to its last step
    fail(session, "torch.manual_seed(5); 1 / 0")
    drawn = session.run("torch.rand(1).item()").value_list
    again = session.run("torch.manual_seed(5); torch.rand(1).item()").value_list
    assert drawn == again


def test_a_rank_survives_a_cell_that_closes_descriptors_0_to_2(session: Session) -> None:
    pids = session.run("import os; os.getpid()").value_list
    with pytest.raises(RankError) as raised:
        session.run("for _fd in (0, 1, 2): os.close(_fd)\nif rank: raise ValueError('closed')")
    assert raised.value.failures == {1: ("ValueError", "closed")}
    assert session.run("os.getpid()").value_list == pids
    result = session.run("_ = os.system('echo from a child'); dist.barrier()")
    assert [result[rank].text.strip() for rank in (0, 1)] == ["from a child"] * 2


ALL = "vars(dist).update({name: other for name in torchs})"


@pytest.mark.parametrize(
    ("before", "now"), [("pass", ALL), ("dist.is_initialized = lambda: False", "pass")]
)
def test_a_fault_costs_no_rank_whatever_a_cell_has_put_in_the_place_of_torchs_functions(
    session: Session, before: str, now: str
) -> None:
    session.run("""
        import inspect, os
        torchs = {n: it for n, it in vars(dist).items() if inspect.isfunction(it) and n[0] != "_"}
        model = nbdist.parallelize(torch.nn.Linear(2, 1), "ddp").model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        def other(*_, **__):
            raise RuntimeError("this is not torch's")
    """)
    pids = session.run("os.getpid()").value_list
    session.run(before, ranks="1")
    text = fail(
        session,
        f"""
        model(torch.ones(1, 2)).sum().backward()
        if rank:
            {now}
            raise ValueError("bad sample")
        optimizer.step()
        """,
    )
    assert "ValueError: bad sample" in text
    assert_usable(session)
    assert session.run("os.getpid()").value_list == pids
    assert (
        session.run("all(vars(dist)[n] is it for n, it in torchs.items())").value_list == [True] * 2
    )
    weights = session.run("model.weight.tolist()").value_list
    assert weights[0] == weights[1]
