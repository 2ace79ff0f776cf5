"""Where the main thread is: cells are known by their files, the rest by the innermost function."""

import inspect
from typing import Any

import pytest

from nbdist.engine.kernel import location, stacks

CELL = "/tmp/ipykernel_nbdist/ab12.py"


def run_as_cell(code: str, **names: Any) -> dict[str, Any]:
    """Run code as IPython runs a cell; return its names."""
    exec(compile(code, CELL, "exec"), names)
    return names


def test_a_cells_file_leads_to_the_prompt_it_came_from() -> None:
    location.here.name_cell(CELL, 7)
    assert location.here.prompt_of(CELL) == 7
    assert location.here.prompt_of("/home/me/train.py") == 0


def test_the_place_is_the_innermost_line_of_a_cell() -> None:
    names = run_as_cell("def f(look):\n    return look()\n\n\nfound = f(look)", look=_look)
    assert names["found"] == (CELL, 2)
    assert location.describe(names["found"]) == f"{CELL}:2"
    assert location.describe(None) is None


def _look() -> location.Place | None:
    return location.here.cell_place(inspect.currentframe())


def test_the_main_thread_is_somewhere_only_in_a_cell() -> None:
    assert location.here.main_thread() is None


def test_the_main_threads_place_names_the_innermost_function_that_is_not_ours() -> None:
    names = run_as_cell(
        "def load():\n    return look()\nfound = load()", look=location.here.main_thread
    )
    assert names["found"] == {"file_line": f"{CELL}:2", "line": 2, "cell": 0, "function": "load"}
    names = run_as_cell("found = look()", look=location.here.main_thread)
    assert names["found"] == {"file_line": f"{CELL}:1", "line": 1, "cell": 0, "function": ""}


def test_a_function_of_another_cell_is_placed_by_that_cells_number() -> None:
    other = "/tmp/ipykernel_nbdist/cd34.py"
    location.here.name_cell(other, 2)
    names: dict[str, Any] = {"look": lambda: (location.here.main_thread(), stacks.stacks())}
    exec(compile("\n\ndef relu():\n    return look()", other, "exec"), names)
    place, told = run_as_cell("found = relu()", relu=names["relu"])["found"]
    assert (place["cell"], place["line"]) == (2, 4)
    assert f'File "{CELL}", line 1, in <module>' in told["MainThread"]
    assert "  cell 2, line 4, in relu" in told["MainThread"]


def test_a_function_in_a_folder_called_as_ours_is_the_users_own() -> None:
    file = "/home/me/nbdist/engine/train.py"
    names: dict[str, Any] = {"look": location.here.main_thread}
    exec(compile("def load():\n    return look()", file, "exec"), names)
    found = run_as_cell("found = load()", load=names["load"])["found"]
    assert found == {"file_line": f"{CELL}:1", "line": 1, "cell": 0, "function": "load"}


def test_the_main_threads_stack_begins_with_the_cell() -> None:
    found = run_as_cell("def f():\n    return look()\nfound = f()", look=stacks.stacks)["found"]
    told = found["MainThread"]
    assert told.lstrip().startswith(f'File "{CELL}", line 3')
    assert f'File "{CELL}", line 2, in f' in told
    assert "test_where" not in told


def test_native_frames_of_the_main_thread_are_found_in_what_py_spy_prints() -> None:
    dump = (
        "Process 7: python\nPython v3.11.7\n\n"
        'Thread 7 (idle): "MainThread"\n'
        "    __poll (libc.so.6)\n    all_reduce (distributed_c10d.py:3252)\n"
        'Thread 9 (idle): "nbdist-records"\n    wait (threading.py:331)\n'
    )
    assert stacks.main_block(dump) == (
        "    __poll (libc.so.6)\n    all_reduce (distributed_c10d.py:3252)"
    )
    assert stacks.main_block("Error: Permission Denied") == ""
    long = 'Thread 7 (idle): "MainThread"\n    ' + "std::" * 1000
    assert len(stacks.main_block(long)) == stacks.MAX_LINE_CHARS + 1


def test_without_py_spy_there_are_no_native_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert stacks.native_frames() == ""
