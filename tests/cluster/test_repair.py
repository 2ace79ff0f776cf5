"""A rank dies, and comes back: in a cell, between two cells; and a cell is run again."""

import contextlib
import os
import re
import signal
import time
from collections.abc import Sequence
from typing import Any

import pytest

from nbdist import ClusterError, RankError, Session
from tests.cluster.conftest import Kernel, SharedCluster
from tests.cluster.test_faults import assert_usable, fail, plain

KILL_1 = "import os, signal\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n"


def kill(session: Session, rank: int) -> None:
    """Kill an idle rank, and wait until the notebook has seen it."""
    os.kill(session.status().ranks[rank].pid, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while session.status().ranks[rank].state == "idle" and time.monotonic() < deadline:
        time.sleep(0.01)


def test_a_rank_killed_in_a_cell_is_named_and_replaced(session: Session) -> None:
    session.run("model = layout = opt = net = None")  # of tests before, cut in parts
    session.run("held = rank + 40")
    pid = session.status().ranks[1].pid
    told = fail(session, KILL_1 + "dist.barrier()")
    assert "rank 1 (localhost, cpu) died: killed by SIGKILL" in told
    assert "rank 0 was released while waiting in barrier" in told
    assert re.search(r"Rank 1 was replaced by a new process \(pid \d+\)", told)
    assert "%dist retry" in told
    status = session.status().ranks[1]
    assert (status.rank, status.state) == (1, "idle")
    assert status.pid != pid
    assert session.run("held", ranks="0").value_list == [40]
    assert_usable(session)


def test_an_object_that_cannot_be_read_costs_its_name_and_not_the_session(session: Session) -> None:
    """A tree whose hash follows from its state: read from a child, it is hashed before that."""
    session.run("""
    class Node:
        def __init__(self, name, parent=None):
            self.name, self.parent, self.children = name, parent, set()
            if parent is not None:
                parent.children.add(self)
        def __hash__(self): return hash(self.name)
    child = Node("child", Node("root"))
    kept = 5
    """)
    told = fail(session, "import os\nif rank == 1: os.kill(os.getpid(), 9)\ndist.barrier()")
    assert "AttributeError: 'Node' object has no attribute 'name'" in told
    assert session.run("kept, type(child).__name__").value_list == [
        (5, "Node"),
        (5, "Placeholder"),
    ]


def test_a_crash_in_c_tells_its_last_words(session: Session) -> None:
    told = fail(session, "import ctypes\nif rank: ctypes.string_at(0)\ndist.barrier()")
    assert "rank 1 (localhost, cpu) died: killed by SIGSEGV" in told
    assert "rank 1 wrote last:\nFatal Python error: Segmentation fault" in told
    assert_usable(session)


def test_a_rank_killed_while_idle_is_shown_dead_and_replaced_before_the_next_cell(
    session: Session,
) -> None:
    session.run("held = [40]")
    kill(session, 0)
    dead, living, *_ = session.status().ranks
    assert dead.state.startswith("dead: killed by SIGKILL")
    assert (dead.is_dead, dead.is_silent) == (True, False)
    assert (living.is_dead, living.is_silent) == (False, False)
    assert session.run("held").value_list == [[40], [40]]
    assert_usable(session)


def test_an_error_on_a_replaced_rank_is_at_the_line_of_the_cell_that_defined_it(
    session: Session,
) -> None:
    session.run("x = 1\n\ndef fails():\n    raise ValueError('of an earlier cell')", prompt=70)
    kill(session, 1)
    told = plain(fail(session, "if rank == 1: fails()"))
    assert "cell 70, line 4  ValueError: of an earlier cell" in told
    assert "----> 4     raise ValueError('of an earlier cell')" in told


def test_a_cell_that_repairs_first_says_so(notebook: Kernel) -> None:
    notebook.run("import os; os.kill(nbdist.current().status().ranks[1].pid, 9)")
    wait = "while nbdist.current().status().ranks[1].state == 'idle': pass"
    notebook.run(wait)
    ran = notebook.cell("rank")
    assert ran.error is None
    assert "Rank 1 had died since the last cell (killed by SIGKILL" in ran.text
    assert "Rank 1 was replaced by a new process" in ran.text


def test_with_every_rank_dead_nothing_can_be_cloned_and_the_next_cell_says_so(
    session: Session,
) -> None:
    kill(session, 0)
    kill(session, 1)
    with pytest.raises(ClusterError, match=r"(?s)Ranks 0-1 had died .*their variables are lost"):
        session.run("rank")
    assert_usable(session)


def test_a_rank_outside_a_cell_that_dies_is_replaced_too(session: Session) -> None:
    session.run("held = rank + 40")
    pid = session.status().ranks[1].pid
    told = fail(session, f"import os\nos.kill({pid}, 9)\ndist.barrier()", ranks="0")
    assert "Rank 1 was replaced by a new process" in told
    assert session.run("held", ranks="0").value_list == [40]
    assert_usable(session)


def test_a_rank_that_dies_just_as_a_cell_is_sent_does_not_hang_it(session: Session) -> None:
    pid = session.status().ranks[1].pid
    os.kill(pid, signal.SIGKILL)
    # The death may be noticed before the cell, which then runs, or within it, which then fails.
    with contextlib.suppress(RankError, ClusterError):
        session.run("dist.barrier()", timeout_s=30)
    assert session.status().ranks[1].pid != pid
    assert_usable(session)


def test_all_ranks_dead_are_replaced_together(session: Session) -> None:
    told = fail(session, "import os; os._exit(3)")
    assert "ranks 0-1 died: exit code 3" in told
    assert "Ranks 0-1 were replaced by new processes" in told
    assert "their variables are lost" in told
    assert_usable(session)


def test_a_rank_that_dies_while_another_comes_back_is_replaced_with_it(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.scale(3)
    session.run("held = rank + 40")
    cluster, replaced = session._cluster, []
    native = cluster.replace

    def replace_and_lose_another(ranks: Sequence[int], n: int | None = None) -> None:
        native(ranks, n)
        replaced.append(list(ranks))
        if len(replaced) == 1:
            os.kill(cluster.ranks[0].pid, signal.SIGKILL)

    monkeypatch.setattr(cluster, "replace", replace_and_lose_another)
    told = fail(session, KILL_1 + "dist.barrier()")
    assert replaced == [[1], [0, 1]]
    assert "%dist retry" in told
    assert session.run("held", ranks="2").value_list == [42]
    session.scale(2)
    assert_usable(session)


def test_a_rank_whose_new_processes_die_at_once_ends_in_one_clear_error(
    cluster: SharedCluster, session: Session
) -> None:
    # Each process that asks for this name dies of it, as of a library that crashes at import.
    session.run("held = rank + 40")
    session._cluster._engine_spec = lambda rank, n: {"rank": rank}
    told = fail(session, KILL_1 + "dist.barrier()")
    assert "Rank 1 could not be replaced: Rank 1 ended while starting" in told
    assert "%dist restart" in told
    with pytest.raises(ClusterError, match="Rank 1 could not be replaced"):
        session.run("rank")
    assert session.pull("held", "0") == [40]
    del session._cluster._engine_spec
    session.restart()
    assert_usable(session)
    assert cluster.healthy() is session


def test_a_rank_stopped_in_the_midst_of_a_recovery_goes_on(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.run("held = rank + 40")
    cluster = session._cluster
    native = cluster.requests.ask

    def ask_and_stop(rank: int, call: str, **more: Any) -> Any:
        if call == "group.recover" and rank == 1:
            os.kill(cluster.ranks[1].pid, signal.SIGSTOP)
        return native(rank, call, **more)

    monkeypatch.setattr(cluster.requests, "ask", ask_and_stop)
    fail(session, "if rank: raise ValueError\ndist.barrier()")
    assert session.run("held").value_list == [40, 41]
    assert_usable(session)


def test_restart_of_a_rank_replaces_dead_ones_with_it(session: Session) -> None:
    kill(session, 0)
    said = session.restart("1")
    assert any("0" in line and "replaced" in line for line in said)
    assert_usable(session)


# Run it again

COUNT = "tries = globals().get('tries', 0) + 1\n"


def test_why_a_rank_died_in_the_midst_of_a_repair_is_told(session: Session) -> None:
    told = fail(
        session,
        "import ctypes\nfrom nbdist.engine.recovery import reset\n"
        "if rank: reset.reset_state = lambda *_: ctypes.string_at(0)\n"
        "dist.barrier()\nif not rank: raise ValueError('no')",
    )
    assert "Rank 1 died during the recovery: killed by SIGSEGV." in told
    assert "Its last output: Fatal Python error: Segmentation fault" in told
    assert "Rank 1 was replaced by a new process" in told
    assert_usable(session)


def test_a_cell_that_failed_is_run_again_until_it_passes(session: Session) -> None:
    session.run("tries = 0")
    result = session.run(COUNT + "if tries < 3: raise ValueError(tries)\ntries", retry=3)
    assert result.value_list == [3, 3]


def test_attempts_that_fail_alike_without_a_step_are_not_repeated_to_the_end(
    session: Session,
) -> None:
    session.run("tries = 0")
    with pytest.raises(RankError, match="attempt 2 failed like the one before, without a step"):
        session.run(COUNT + "1 / 0", retry=5)
    assert session.run("tries").value_list == [2, 2]


def test_the_last_of_several_attempts_says_so(session: Session) -> None:
    with pytest.raises(RankError, match="the last of 2 attempts"):
        session.run(COUNT + "raise ValueError(tries)", retry=1)


def test_what_does_not_compile_is_tried_once(session: Session) -> None:
    cells = session._attempts._count
    with pytest.raises(Exception, match="invalid syntax"):
        session.run("1 +* 1", retry=3)
    assert session._attempts._count == cells


def test_retry_runs_the_last_failed_cell_as_it_was_asked_for(session: Session) -> None:
    session.run("tries = 0")
    fail(session, COUNT + "if tries < 2: raise ValueError\n(rank, lr)", params={"lr": 3}, ranks="1")
    session.run("between = 1")
    assert session.retry().value_list == [(1, 3)]
    with pytest.raises(ClusterError, match="nothing to retry"):
        session.retry()


def test_an_interrupted_cell_can_be_retried(session: Session) -> None:
    session.run("again = False")
    with pytest.raises(ClusterError, match="--timeout"):
        session.run("import time\nif not again: time.sleep(60)\n7", timeout_s=0.3)
    session.run("again = True")
    assert session.retry().value_list == [7, 7]


TRAIN = """
model = torch.nn.Linear(2, 1)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
tries = globals().get('tries', 0) + 1
for i in range(3):
    model(torch.ones(1, 2)).sum().backward(); opt.step(); opt.zero_grad()
if tries < 2: raise ValueError('half way')
print('went well')
"""


def test_attempts_stay_readable_in_one_cell_and_go_on_with_one_run(notebook: Kernel) -> None:
    notebook.cell("globals().pop('tries', 0)")
    ran = notebook.cell(TRAIN, "--retry 2 --run tried")
    assert ran.error is None
    text = plain(ran.text)
    assert "Attempt 2 of 3, after: ranks 0-1  cell" in text
    assert "ValueError: half way" in text
    assert text.index("Attempt 2 of 3") < text.index("went well")
    assert text.count('Saved as MLflow run "tried"') == 2
    table = notebook.run("%dist runs --sync --plain").text
    rows = [line for line in table.splitlines() if "tried" in line]
    assert len(rows) == 1, table


def test_nothing_to_retry_is_one_clear_error(notebook: Kernel) -> None:
    notebook.run("%dist restart")
    notebook.run("import nbdist; nbdist.current()._attempts._failed = None")
    ran = notebook.run("%dist retry")
    assert ran.error is not None
    assert "There is nothing to retry" in ran.error[2]
