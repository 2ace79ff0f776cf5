"""A `%%distributed` cell behaves as a cell does in IPython: real ranks, called from Python."""

import ast
import math
import re
import subprocess
import sys
from typing import Any

import pytest

from nbdist import CellSyntaxError, ClusterError, RankError, Session, UsageError
from nbdist.client.faults import fault_handler
from tests.cluster.conftest import LONGEST_S


def text(session: Session, code: str, ranks: str = "all") -> list[str]:
    """Run a cell; return what each rank printed."""
    return [part.text.rstrip() for part in session.run(code, ranks).values()]


def test_names_that_every_rank_has(session: Session) -> None:
    code = """
assert local_rank == rank and device == torch.device("cpu")
assert dist.get_rank() == rank and dist.get_world_size() == world_size == 2
assert nbdist.parallelize and dist is torch.distributed
rank
"""
    assert session.run(code).value_list == [0, 1]


def test_full_collections_leave_out_what_a_rank_was_forked_with(session: Session) -> None:
    code = "import gc; gc.get_freeze_count() > len(gc.get_objects())"
    assert session.run(code).value_list == [True, True]


def test_a_rank_has_ipykernels_debugger_which_traces_nothing_and_listens_nowhere(
    session: Session,
) -> None:
    session.run("import sys, threading, psutil, debugpy, ipykernel.debugger")
    assert session.run("ipykernel.debugger._is_debugpy_available").value_list == [True, True]
    traced = "sys.gettrace() or threading.gettrace() or debugpy.is_client_connected()"
    assert not any(session.run(traced).value_list)
    code = "[t.name for t in threading.enumerate() if 'pydevd' in t.name.lower()]"
    assert session.run(code).value_list == [[], []]
    assert "3." in session.run("get_ipython().kernel.language_info['version']").value_list[0]


def test_statements_run_in_order_and_the_last_value_is_the_result(session: Session) -> None:
    result = session.run("a = 1\nb = a + rank\nb + 1")
    assert result.value_list == [2, 3]
    assert result.ok
    assert session.run("a + b").value_list == [2, 3]


def test_a_semicolon_and_a_statement_give_no_value(session: Session) -> None:
    assert session.run("1 + 1;").value_list == [None, None]
    assert session.run("x = 5").value_list == [None, None]
    assert session.run("x = 5").by_rank[0].displays == ()


def test_the_last_value_is_kept_under_an_underscore(session: Session) -> None:
    session.restart()  # an earlier test may have given the name another value
    session.run("41 + rank")
    assert session.run("_ + 1").value_list == [42, 43]


@pytest.mark.parametrize(
    "value",
    [
        "None",
        "True",
        "-7",
        "10**40",
        "'text \\u00e9\\u4e2d'",
        "(1, (2.5, None), [])",
        "{'a': {1: (2, 3)}, (4, 5): [True]}",
        "float('inf')",
        "{}",
        "''",
    ],
)
def test_a_plain_value_comes_back_as_itself(session: Session, value: str) -> None:
    expected = eval(value)
    for got in session.run(value).value_list:
        assert got == expected
        assert type(got) is type(expected)


def test_a_nan_comes_back_as_nan(session: Session) -> None:
    assert all(math.isnan(v) for v in session.run("[float('nan')]").by_rank[1].value)


def test_values_that_are_not_plain_or_too_large_come_back_as_their_repr(session: Session) -> None:
    assert session.run("torch.ones(2)").value_list == ["tensor([1., 1.])"] * 2
    assert session.run("import numpy; numpy.float32(2.5)").by_rank[0].value == "np.float32(2.5)"
    large = session.run("'x' * 70_000").by_rank[0].value
    assert isinstance(large, str)
    assert large.startswith("'xxx")
    assert len(large) < 5000
    cyclic = session.run("c = []; c.append(c); c").by_rank[0].value
    assert cyclic == "[[...]]"


def test_a_value_whose_repr_fails_fails_the_cell_and_is_named(session: Session) -> None:
    with pytest.raises(RankError, match="line 2  ValueError: no repr"):
        session.run("class R:\n    def __repr__(self): raise ValueError('no repr')\nR()")


def test_top_level_await(session: Session) -> None:
    assert session.run("import asyncio\nawait asyncio.sleep(0.01)\nrank * 2").value_list == [0, 2]
    code = "async def f():\n    await asyncio.sleep(0)\n    return rank\n[await f() for _ in 'ab']"
    assert session.run(code).value_list == [[0, 0], [1, 1]]


def test_shell_commands_and_their_output(session: Session) -> None:
    assert text(session, "!echo hello; echo trouble >&2") == ["hello\ntrouble"] * 2
    assert session.run("listed = !printf 'a\\nb\\n'\nlist(listed)").value_list == [["a", "b"]] * 2
    assert text(session, "!echo from {rank}") == ["from 0", "from 1"]


def test_line_magics_and_cell_magics_inside(session: Session) -> None:
    assert text(session, "%cd -q .\n%env NBDIST_TEST=1\n!echo $NBDIST_TEST")[0].endswith("\n1")
    assert text(session, "%%bash\necho in bash") == ["in bash"] * 2
    assert "per loop" in text(session, "%timeit -n1 -r1 pass")[0]
    assert session.run("%%time\nx = 3").ok
    assert session.run("x").value_list == [3, 3]
    assert session.run("%%capture caught\nprint('hidden')").by_rank[0].text == ""
    assert session.run("caught.stdout").value_list == ["hidden\n"] * 2


def test_a_cell_may_be_empty_or_nothing_but_comments(session: Session) -> None:
    assert session.run("").value_list == [None, None]
    assert session.run("# nothing\n\n").value_list == [None, None]


def test_both_streams_and_logging_keep_their_order(session: Session) -> None:
    code = """
import logging, sys, warnings
print("one")
print("two", file=sys.stderr)
logging.getLogger("mine").warning("three")
print("fo", end=""); print("ur")
"""
    assert text(session, code) == ["one\ntwo\nthree\nfour"] * 2


def test_logging_that_the_cell_configures(session: Session) -> None:
    code = """
import logging
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", force=True)
logging.info("said by %d", rank)
logging.basicConfig(level=logging.WARNING, force=True)
"""
    assert text(session, code) == ["INFO said by 0", "INFO said by 1"]


def test_a_warning_is_shown(session: Session) -> None:
    said = text(session, "import warnings\nwarnings.warn('mind the gap')")
    assert all("UserWarning: mind the gap" in part for part in said)


def test_tqdm_leaves_its_last_state(session: Session) -> None:
    code = "from tqdm import tqdm\nfor _ in tqdm(range(30), desc='work'): pass"
    for part in text(session, code):
        assert "work: 100%" in part
        assert part.count("work:") == 1


def test_print_with_carriage_returns_shows_the_last(session: Session) -> None:
    assert text(session, "for i in range(5): print(f'\\rstep {i}', end='')") == ["step 4"] * 2


@pytest.mark.parametrize("call", ["input('? ')", "import getpass; getpass.getpass()"])
def test_asking_for_input_is_refused_with_a_way_out(session: Session, call: str) -> None:
    with pytest.raises(RankError, match=r"cannot ask from a rank.*%dist push"):
        session.run(call)


def test_the_source_of_what_a_cell_defines_can_be_read(session: Session) -> None:
    code = "import inspect\ndef f(x):\n    return x  # my line\ninspect.getsource(f)"
    assert "# my line" in session.run(code).by_rank[1].value
    assert "# my line" in session.run("inspect.getsource(f)").by_rank[0].value


def test_objects_of_a_class_made_in_a_cell_pickle(session: Session) -> None:
    code = """
import pickle, copy
class Point:
    def __init__(self, x): self.x = x
copied = pickle.loads(pickle.dumps(Point(rank)))
assert type(copied) is Point and copy.deepcopy(copied).x == rank
Point.__module__
"""
    assert session.run(code).value_list == ["__main__"] * 2


def test_a_function_of_a_cell_compiles(session: Session) -> None:
    code = """
@torch.compile(backend="eager")
def f(x):
    return (x * 2).relu() + 1
f(torch.ones(3) * rank).tolist()
"""
    assert session.run(code).value_list == [[1.0] * 3, [3.0] * 3]


@pytest.mark.slow
def test_a_function_of_a_cell_compiles_with_gradients(session: Session) -> None:
    code = """
model = torch.nn.Linear(3, 1)
f = torch.compile(lambda x: model(x).pow(2).sum(), backend="aot_eager")
f(torch.ones(2, 3)).backward()
model.weight.grad is not None
"""
    assert session.run(code).value_list == [True, True]


def test_a_dataloader_with_forked_workers_that_print(session: Session) -> None:
    code = """
from torch.utils.data import DataLoader, Dataset
class Numbers(Dataset):
    def __len__(self): return 8
    def __getitem__(self, i):
        print(f"item {i}")
        return i
total = sum(int(batch.sum()) for batch in DataLoader(Numbers(), batch_size=2, num_workers=2))
total
"""
    result = session.run(code, timeout_s=60)
    assert result.value_list == [28, 28]
    for part in result.values():
        assert sorted(part.text.split("\n")) == sorted(f"item {i}" for i in range(8))


def test_subprocesses_and_c_code_are_heard_in_order(session: Session) -> None:
    code = """
import ctypes, os, subprocess, sys
print("python")
subprocess.run([sys.executable, "-S", "-c", "print('a child')"], check=True)
libc = ctypes.CDLL(None)
libc.puts(b"from C"); libc.fflush(None)
os.write(2, b"raw\\n")
print("end")
"""
    assert text(session, code) == ["python\na child\nfrom C\nraw\nend"] * 2


def test_threads_of_a_cell_are_heard(session: Session) -> None:
    code = """
import threading
t = threading.Thread(target=lambda: print("from a thread"))
t.start(); t.join()
"""
    assert text(session, code) == ["from a thread"] * 2


def test_parameters_are_set_before_the_cell_runs(session: Session) -> None:
    params = {"lr": 3e-4, "sizes": (1, 2), "name": "a b", "deep": {"x": [None, float("inf")]}}
    got = session.run("[lr, sizes, name, deep]", params=params).by_rank[1].value
    assert got == list(params.values())
    with pytest.raises(UsageError, match="-p model takes"):
        session.run("pass", params={"model": object()})


def test_a_cell_on_some_ranks_leaves_the_others_alone(session: Session) -> None:
    session.run("mark = 0")
    result = session.run("mark = 1; rank", ranks="1")
    assert dict(result.items())[1].value == 1
    assert result.ranks == (1,)
    assert session.run("mark").value_list == [0, 1]


def test_a_syntax_error_reaches_no_rank_and_shows_the_place(session: Session) -> None:
    session.run("count = 0")
    with pytest.raises(CellSyntaxError) as caught:
        session.run("count = 1\nif True print(1)")
    assert "line 2" in str(caught.value)
    assert "if True print(1)" in str(caught.value)
    assert "^" in str(caught.value)
    assert session.run("count").value_list == [0, 0]


def test_syntax_that_only_cells_have_is_no_error(session: Session) -> None:
    assert session.run("%matplotlib inline\n?print\n!true\nrank").value_list == [0, 1]


@pytest.mark.parametrize("ranks", ["2", "0-5", "", "one", "-1", "0,,1"])
def test_ranks_that_do_not_exist_are_refused(session: Session, ranks: str) -> None:
    with pytest.raises(UsageError):
        session.run("rank", ranks=ranks)


def test_a_cell_while_another_runs_is_refused_and_harms_neither(session: Session) -> None:
    import threading

    gate = "import pathlib, time\npathlib.Path(f'in-{rank}').touch()\n"
    wait = "while not pathlib.Path('go').exists(): time.sleep(0.01)\nrank"
    got: list[object] = []
    runner = threading.Thread(target=lambda: got.append(session.run(gate + wait).value_list))
    runner.start()
    from pathlib import Path

    try:
        while not (Path("in-0").exists() and Path("in-1").exists()):
            runner.join(0.01)
        with pytest.raises(ClusterError, match="still running"):
            session.run("rank")
        with pytest.raises(ClusterError, match="still running"):
            session.restart()
        assert all("computing" in line.state for line in session.status().ranks)
    finally:
        Path("go").touch()
        runner.join(30)
    assert got == [[0, 1]]
    assert session.run("rank").value_list == [0, 1]


def test_a_failed_cell_keeps_what_it_did_before(session: Session) -> None:
    with pytest.raises(RankError):
        session.run("kept = rank + 10\nraise ValueError")
    assert session.run("kept").value_list == [10, 11]


def test_libraries_that_spoil_the_environment_do_so_for_one_cell(session: Session) -> None:
    session.run(
        "import os; os.environ.update(RANK='9', MASTER_PORT='1'); del os.environ['WORLD_SIZE']"
    )
    code = "e = os.environ; [e['RANK'], e['WORLD_SIZE'], e['MASTER_PORT'] != '1']"
    assert session.run(code).value_list == [["0", "2", True], ["1", "2", True]]


def test_random_numbers_differ_between_ranks(session: Session) -> None:
    session.restart()  # an earlier test may have seeded them
    first, second = session.run("import random; (torch.rand(1).item(), random.random())").value_list
    assert first[0] != second[0]
    assert first[1] != second[1]


def test_cells_are_numbered_alike_on_all_ranks(session: Session) -> None:
    with pytest.raises(RankError) as caught:
        session.run("x = 1\n1 / 0")
    assert "ranks 0-1" in str(caught.value)
    assert "line 2  ZeroDivisionError: division by zero" in str(caught.value)


@pytest.mark.parametrize(
    "lost",
    [
        "sys.stdout = None",
        "sys.stderr = None",
        "sys.stdout = sys.stderr = None",
        "sys.stdout.close(); sys.stderr.close()",
        # On a busy machine ipykernel flushes it before it is put back, and that fails the cell.
        pytest.param(
            "sys.stdout = open(os.devnull, 'w'); sys.stdout.close()", marks=pytest.mark.slow
        ),
        pytest.param("sys.stdout = object()", marks=pytest.mark.slow),  # the same
        "sys.stdin = None",
        "sys.stdin = open(os.devnull); sys.stdin.close()",
    ],
)
def test_a_cell_that_takes_its_streams_away_costs_no_later_cell(
    session: Session, lost: str
) -> None:
    took = session.run(f"import os, sys\n{lost}\n7 + rank")
    assert took.value_list == [7, 8]
    with pytest.raises(RankError, match="ValueError: after that"):
        session.run(f"import os, sys\n{lost}\nraise ValueError('after that')")
    assert text(session, "print('seen', rank)") == ["seen 0", "seen 1"]
    shown = session.run("import sys\nprint('said', file=sys.stderr)").by_rank[1]
    assert "said" in shown.text


def test_while_there_is_no_stdout_printing_goes_nowhere(session: Session) -> None:
    code = "import sys\nsys.stdout = None\nprint('nowhere')\nsys.stdout is None"
    assert session.run(code).value_list == [True, True]
    assert text(session, "print('here')") == ["here", "here"]


def test_a_stream_of_the_programs_own_stays_until_it_takes_it_away(session: Session) -> None:
    session.run("import io, sys\nmine = sys.stdout = io.StringIO()")
    session.run("print('kept')")
    kept = "said = mine.getvalue()\nsys.stdout = None\nsaid"
    assert session.run(kept).value_list == ["kept\n"] * 2
    assert text(session, "print('here')") == ["here", "here"]


@pytest.mark.parametrize(
    "body",
    [
        "raise RuntimeError('no text')",
        "return 7",
        "raise KeyboardInterrupt",
        "raise SystemExit(3)",
    ],
)
def test_an_exception_that_cannot_be_told_is_named_by_its_type(session: Session, body: str) -> None:
    session.run("kept = 5 + rank")
    code = (
        f"class Odd(Exception):\n    def __str__(self):\n        {body}\n    __repr__ = __str__\n"
    )
    with pytest.raises(RankError) as caught:
        session.run(code + "raise Odd()")
    assert caught.value.failures == dict.fromkeys((0, 1), ("Odd", "<exception str() failed>"))
    assert "Odd: <exception str() failed>" in str(caught.value)
    with pytest.raises(RankError, match="ValueError: told"):
        session.run("try:\n    raise Odd()\nexcept Odd as error:\n    raise ValueError('told')")
    with pytest.raises(RankError, match="ExceptionGroup: two"):
        session.run("raise ExceptionGroup('two', [Odd(), ValueError('other')])")
    assert session.run("kept").value_list == [5, 6]


def test_the_text_of_an_exception_is_taken_once_and_is_bounded(session: Session) -> None:
    code = """
class Long(Exception):
    asked = 0
    def __str__(self):
        Long.asked += 1
        return 'begin' + 30_000_000 * 'x' + 'end'
raise Long()
"""
    with pytest.raises(RankError) as caught:
        session.run(code)
    name, said = caught.value.failures[0]
    assert name == "Long"
    assert said.startswith("beginxxx")
    assert said.endswith("xxxend")
    assert len(str(caught.value)) < 100_000
    assert session.run("Long.asked").value_list == [1, 1]


def shown_error(session: Session, code: str) -> str:
    """Return a failing cell's error without colours."""
    with pytest.raises(RankError) as caught:
        session.run(code)
    return re.sub(r"\x1b\[[0-9;]*m", "", str(caught.value))


GROUP = """
def fail(i):
    raise ValueError(f"sample {i}")
errors = []
for i in (3, 5):
    try:
        fail(i)
    except ValueError as error:
        errors.append(error)
raise ExceptionGroup("two samples", [ExceptionGroup("inner", errors), KeyError("path")])
"""


@pytest.mark.parametrize("after", ["", "\n"], ids=["alone", "as a context"])
def test_an_exception_group_tells_all_it_holds_and_no_frames_of_ipython(
    session: Session, after: str
) -> None:
    code = GROUP
    if after:
        body = GROUP.replace("\n", "\n    ")
        code = f"try:{body}\nexcept ExceptionGroup:\n    raise RuntimeError('then this')"
    told = shown_error(session, code)
    first = "ExceptionGroup: two samples (2 sub-exceptions)"
    assert ("RuntimeError: then this" if after else first) in told.splitlines()[1]
    assert "cell " in told.splitlines()[1]
    for line in ("2 of 2 in it:", "ValueError: sample 3", "ValueError: sample 5"):
        assert line in told
    assert "KeyError: 'path'" in told
    assert 'raise ValueError(f"sample {i}")' in told
    assert "IPython" not in told
    assert "run_code" not in told


def test_the_cause_of_an_error_is_shown_at_its_own_line(session: Session) -> None:
    told = shown_error(
        session, "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise OSError from error"
    )
    assert "----> 2     1 / 0" in told
    assert "----> 4     raise OSError from error" in told


def test_a_recursion_without_end_is_told_in_a_few_lines(session: Session) -> None:
    told = shown_error(session, "def dive(n):\n    return dive(n + 1)\ndive(0)")
    assert "RecursionError" in told.splitlines()[1]
    assert "skipping similar frames: dive at line 2 (" in told
    assert len(told.splitlines()) < 50


WORKER = """
class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        raise ValueError(f"bad sample {i}")
next(iter(torch.utils.data.DataLoader(Samples(), num_workers=1)))
"""


def test_what_a_loaders_worker_raised_is_told_first_and_cells_by_name(session: Session) -> None:
    told = shown_error(session, WORKER)
    assert told.splitlines()[1].endswith(
        "ValueError: bad sample 0 (in DataLoader worker process 0)"
    )
    assert "cell, line 5, in __getitem__" in told
    assert "ipykernel_nbdist" not in told


def test_ranks_that_end_a_cell_together_are_asked_nothing_beside_it(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests, asked = session._cluster.requests, list[str]()
    ask = requests.ask

    def note(rank: int, call: str, **more: Any) -> Any:
        asked.append(call)
        return ask(rank, call, **more)

    monkeypatch.setattr(requests, "ask", note)
    with pytest.MonkeyPatch.context() as patch:
        # On a busy machine ranks that end together may be a second apart.
        patch.setattr(fault_handler, "_ENDING_S", LONGEST_S)
        patch.setattr(fault_handler, "_SILENT_AFTER_S", LONGEST_S)
        session.run("import time; time.sleep(0.05 * rank)")
    assert "control.state" not in asked
    session.run("import time; time.sleep(1.5 * rank)")
    assert "control.state" in asked


def test_a_profiler_of_python_works_in_a_cell_that_follows_others(session: Session) -> None:
    # What was left of a cell's end once made CPython 3.11 check for signals at every call, for
    # ever: a profiler went round in circles, and all other Python code was slower.
    session.run("pass")
    code = """
import cProfile, pstats
def called():
    return 1

profile = cProfile.Profile()
profile.runcall(lambda: [called() for _ in range(100)])
pstats.Stats(profile).total_calls
"""
    calls = session.run(code, timeout_s=60).value_list
    assert min(calls) >= 100, calls


def test_ranks_have_all_of_nbdist_before_they_are_forked(session: Session) -> None:
    # Each rank imported 160 modules by itself: with 16 ranks on 2 cores, seconds of a start.
    session.restart()
    ours = "sorted(m for m in __import__('sys').modules if m.split('.')[0] == 'nbdist')"
    (imported,) = session.run(ours, "0").value_list
    code = f"""
from importlib import import_module
from nbdist.host import parent, warm
for name in warm.MODULES:
    import_module(name)
print({ours})
"""
    warm = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(imported) <= {*ast.literal_eval(warm.stdout)}


def test_a_run_is_continued_by_its_name(session: Session) -> None:
    with pytest.raises(UsageError, match="no name was given"):
        session.run("1", resume=True)
