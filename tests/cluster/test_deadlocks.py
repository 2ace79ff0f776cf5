"""Ranks that wait for one that will never come, and ranks that are merely slow."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import nbdist
from nbdist import RankError, Session
from tests.cluster.conftest import LONGEST_S, Kernel

WORK = "_t = torch.ones(1); dist.all_reduce(_t); int(_t)"
GROUPS = "g = [dist.new_group([0, 1]), dist.new_group([0, 1])]"

# What never ends by itself: each cell, and what its error says.
DEADLOCKS = {
    "one rank has finished": (
        "all",
        "t = torch.ones(1000)\nif rank == 0:\n    dist.all_reduce(t)",
        [
            "rank 1 has finished the cell; rank 0 waits for it in all_reduce #",
            "(4.0 kB, the default group), line 3.",
        ],
    ),
    "one rank is not in the cell": (
        "1",
        "dist.barrier()",
        ["rank 0 is not in this cell (-r 1); rank 1 waits for it in barrier #"],
    ),
    "an asynchronous collective is waited for": (
        "0",
        "w = dist.all_reduce(torch.ones(1), async_op=True)\nw.wait()",
        ["rank 1 is not in this cell (-r 0); rank 0 waits for it in all_reduce"],
    ),
    "within DDP's backward": (
        "all",
        """
m = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
l = m(torch.ones(4, 2)).sum()
if rank: l.backward()
""",
        ["rank 0 has finished the cell; rank 1 waits for it in all_reduce #"],
    ),
    "where DDP lays its buckets anew": (
        "all",
        """
m = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
m(torch.ones(4, 2)).sum().backward()
if rank == 0: m(torch.ones(4, 2))
""",
        ["rank 1 has finished the cell; rank 0 waits for it in broadcast #", "), line 3."],
    ),
    "where DDP sends buffers": (
        "all",
        """
m = torch.nn.parallel.DistributedDataParallel(torch.nn.BatchNorm1d(2))
if rank: m(torch.ones(4, 2))
""",
        ["rank 0 has finished the cell; rank 1 waits for it in broadcast #", "), line 2."],
    ),
    "one rank makes a DDP": (
        "all",
        "if rank: torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))",
        ["rank 0 has finished the cell; rank 1 waits for it in all_gather #", "), line 1."],
    ),
    "two groups in crossed order": (
        "all",
        f"{GROUPS}\nfor x in g if rank else g[::-1]:\n    dist.all_reduce(torch.ones(1), group=x)",
        ["rank 0 waits for rank 1 in all_reduce #1", "neither can go on"],
    ),
    "nobody sends": (
        "all",
        "if rank == 0:\n    dist.recv(torch.ones(1), 1)",
        ["rank 1 has finished the cell; rank 0 waits for it in recv #1 "],
    ),
    "a receive has another tag": (
        "all",
        "t = torch.ones(1)\ndist.recv(t, 0, tag=2) if rank else dist.send(t, 1, tag=1)",
        [
            "rank 0 waits for rank 1 in send #",
            "rank 1 waits for rank 0 in recv #1 (4 B, tag 2, the default group), line 2",
            "neither can go on",
        ],
    ),
    "messages in a batch have other tags": (
        "all",
        """
t, u = torch.ones(1), torch.ones(1)
ops = [(dist.isend, t, 1 - rank), (dist.irecv, u, 1 - rank)]
ops = [dist.P2POp(op, x, peer, tag=7 + rank) for op, x, peer in ops]
for work in dist.batch_isend_irecv(ops): work.wait()
""",
        ["rank 0 waits for rank 1 in send #", "tag 7", "tag 8", "neither can go on"],
    ),
    "nobody sends to who receives from anyone": (
        "all",
        "if rank == 0:\n    dist.recv(torch.ones(1))",
        ["rank 1 has finished the cell; rank 0 waits for it in recv #"],
    ),
    "one rank makes a group": (
        "all",
        "if rank == 0:\n    dist.new_group([0, 1])",
        ["rank 1 has finished the cell; rank 0 waits for it in "],
    ),
}


def assert_whole(session: Session) -> None:
    assert session.run(WORK).value_list == [2, 2]
    assert session.run("kept").value_list == [1, 2]


# The first is a broadcast within DDP as "where DDP lays its buckets anew" is, the second a
# collective that one rank alone makes in a constructor, as "one rank makes a group".
OF_A_KIND = ("where DDP sends buffers", "one rank makes a DDP")


@pytest.mark.parametrize(
    ("ranks", "code", "told"),
    [
        pytest.param(*case, id=name, marks=(pytest.mark.slow,) if name in OF_A_KIND else ())
        for name, case in DEADLOCKS.items()
    ],
)
def test_a_proven_deadlock_ends_with_both_sides_named_and_everything_kept(
    session: Session, ranks: str, code: str, told: list[str]
) -> None:
    session.run("kept = rank + 1")

    with pytest.raises(RankError) as caught:
        session.run(code, ranks, timeout_s=30)

    for part in told:
        assert part in caught.value.what
    assert "Traceback" not in caught.value.what, "what the freed ranks raise tells nothing"
    assert "kept their variables" in caught.value.do
    assert_whole(session)


def test_a_rank_that_swallows_its_error_does_not_hide_the_deadlock(session: Session) -> None:
    session.run("kept = rank + 1")
    code = "if rank:\n    try: dist.barrier()\n    except RuntimeError: pass"
    with pytest.raises(RankError, match="rank 0 has finished the cell; rank 1 waits for it"):
        session.run(code, timeout_s=30)
    assert_whole(session)


SLOW = {
    "a rank that computes": "import time\nif rank: time.sleep(1.2)\ndist.barrier()",
    "a rank that comes late to where DDP lays its buckets": (
        "import time\nm = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))\n"
        "m(torch.ones(4, 2)).sum().backward()\nif rank: time.sleep(1.2)\nm(torch.ones(4, 2))"
    ),
    "a message whose tag comes later": (
        "import time\nt = torch.ones(1)\n"
        "if rank:\n    dist.recv(t, 0, tag=2); dist.recv(t, 0, tag=1)\n"
        "else:\n    work = dist.isend(t, 1, tag=1); time.sleep(1.2); dist.send(t, 1, tag=2)\n"
        "    work.wait()"
    ),
    "ranks that end far apart": "import time\ntime.sleep(1.2 * rank)",
    "a chain of ranks": (
        f"import time\n{GROUPS}\nif rank: time.sleep(1.2)\n"
        "for one in g: dist.all_reduce(torch.ones(1), group=one)"
    ),
}


@pytest.mark.parametrize("code", SLOW.values(), ids=SLOW)
def test_a_slow_cell_is_left_alone(session: Session, code: str) -> None:
    session.run("kept = rank + 1")
    session.run(code, timeout_s=30)
    assert_whole(session)


def test_a_cell_on_some_of_the_ranks_is_left_alone(session: Session) -> None:
    assert session.run("import time; time.sleep(1.2); 5", "0", timeout_s=30).value_list == [5]


def test_a_cell_whose_time_runs_out_says_what_each_rank_did(session: Session) -> None:
    session.run("kept = rank + 1")
    code = "import time\nif rank: time.sleep(60)\ndist.barrier()"
    with pytest.raises(nbdist.ClusterError) as caught:
        session.run(code, timeout_s=4)  # on a busy machine ranks take a second or two to get there
    assert "rank 1 computes" in caught.value.why
    assert "rank 0 waits for it in barrier #" in caught.value.why
    assert_whole(session)


@pytest.fixture(scope="module")
def impatient(kernel: Kernel) -> Iterator[Kernel]:
    """A notebook whose cells explain themselves after a second."""
    kernel.run("%load_ext nbdist")
    kernel.run("%dist stop")
    kernel.run("%config NBDist.quiet = 1")
    started = kernel.run("%dist start -n 2 --device cpu", timeout_s=2 * LONGEST_S)
    assert "Started 2 ranks" in started.text, started
    yield kernel
    kernel.run("%config NBDist.quiet = 10")
    kernel.run("%dist stop")


QUIET = """
import time
def load_batch():
    time.sleep(4)
if rank == 0: load_batch()
dist.barrier()
print("on", flush=True)
time.sleep(0.3)
"""


def test_a_quiet_cell_says_what_each_rank_does_until_it_moves_again(impatient: Kernel) -> None:
    ran = impatient.cell(QUIET)

    assert ran.error is None
    notes = [text for text in ran.live if "No progress for" in text]
    assert len(notes) > 1, "the note tells the time"
    # On a busy machine the first may come before both ranks have got there.
    both = ("rank 1 waits for it in barrier #", "rank 0 computes in load_batch (line 5)")
    assert any(all(words in note for words in both) for note in notes), notes
    assert "Interrupt the kernel (■) to stop" in notes[0]
    assert any("on" in text and "Nothing" not in text for text in ran.live)
    assert ran.text == "ranks 0-1 │ on"


@pytest.mark.slow
def test_a_quiet_cell_that_is_not_live_says_it_in_lines_that_stay(impatient: Kernel) -> None:
    impatient.run("import os; os.environ['NBDIST_STATIC'] = '1'")
    ran = impatient.cell(QUIET)
    impatient.run("os.environ['NBDIST_STATIC'] = '0'")

    assert ran.error is None
    first, *more, last = ran.text.splitlines()
    assert first.startswith("No progress for ")
    assert "rank 0 computes in load_batch (line 5)" in first
    assert "rank 1 waits for it in barrier #" in first
    assert len(more) < 3, "each wait is told when it has lasted twice as long"
    assert last == "ranks 0-1 │ on"


def test_stacks_and_status_say_what_each_rank_does_while_a_cell_runs(
    session: Session, tmp_path: Path
) -> None:
    looked = tmp_path / "looked"
    code = f"""import os, time
def work():
    while not os.access({str(looked)!r}, os.F_OK): time.sleep(0.01)
if rank: work()
dist.barrier()
"""
    runner = threading.Thread(target=session.run, args=[code], kwargs={"timeout_s": 30})
    runner.start()
    stacks = ""
    # Rank 1 is asked in the midst of what it does: it may be anywhere in its loop.
    while not ("barrier" in stacks and "computing in work (line 3)" in stacks):
        runner.join(0.05)
        assert runner.is_alive()
        stacks = str(session.stacks())
    status = str(session.status())
    looked.touch()
    runner.join(30)

    assert "rank 1: computing in work (line 3)\n  cell, line 4, in <module>" in stacks
    assert "s in barrier #" in stacks
    assert "line 5 for rank 1" in stacks
    assert "ipykernel" not in stacks
    assert "computing in work (line 3)" in status
    assert "rank 0: idle\nrank 1: idle" in str(session.stacks())


def test_a_function_of_another_cell_is_shown_with_that_cells_number(
    session: Session, tmp_path: Path
) -> None:
    looked = tmp_path / "looked"
    session.run(
        "import os, time\n\n"
        f"def work():\n    while not os.access({str(looked)!r}, os.F_OK): time.sleep(0.01)\n\n"
        "def meet():\n    dist.barrier()",
        prompt=31,
    )
    cell = {"timeout_s": 30, "prompt": 32}
    runner = threading.Thread(target=session.run, args=["if rank: work()\nmeet()"], kwargs=cell)
    runner.start()
    stacks = ""
    while not ("computing in work (cell 31, line 4)" in stacks and "cell 31, line 7 for" in stacks):
        runner.join(0.05)
        assert runner.is_alive(), stacks
        stacks = str(session.stacks())
    looked.touch()
    runner.join(30)
    assert "  cell, line 1, in <module>" in stacks
    assert "  cell 31, line 4, in work" in stacks
