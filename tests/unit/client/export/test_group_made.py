"""The process group, which cells make or end themselves: in the script as in the notebook."""

import pytest

from nbdist.client.export.blocks import Block
from nbdist.client.export.group_made import ended_early, for_modules, taken_as_done
from tests.unit.client.export.exported import script


@pytest.mark.parametrize(
    ("before", "call", "guard"),
    [
        ("", 'dist.init_process_group("gloo")  # why', "dist"),
        ("a = 'ü'; ", "torch.distributed.init_process_group(\n    t,\n)", "torch.distributed"),
        ("import torch.distributed as d\ndef f():\n    ", "d.init_process_group()", "d"),
        ("from torch import distributed\n", "distributed.init_process_group()", "distributed"),
        (
            "from torch.distributed import init_process_group as init\n",
            "init()",
            "torch.distributed",
        ),
    ],
)
def test_a_statement_that_makes_the_group_is_taken_as_done(
    before: str, call: str, guard: str
) -> None:
    code = before + call
    assert taken_as_done(code, code) == f"{before}{guard}.is_initialized() or {call}"


@pytest.mark.parametrize(
    "code",
    [
        "if not dist.is_initialized():\n    dist.init_process_group()",
        "trainer.init_process_group()",
        "init = dist.init_process_group",
        "print(1)",
    ],
)
def test_all_else_stays_as_it_was_typed(code: str) -> None:
    assert taken_as_done(code, code) == code


def test_a_cell_that_makes_the_group_prints_nothing_in_a_script() -> None:
    made = script('%%distributed\ndist.init_process_group("gloo")').text
    assert '\ndist.is_initialized() or dist.init_process_group("gloo")\n' in made


def test_below_nbdist_init_the_call_stays_as_it_is_taken_as_done_there() -> None:
    made = script(
        '%%distributed\ndist.init_process_group("gloo")', "%%distributed\nnbdist.log(a=1)"
    )
    assert '\ndist.init_process_group("gloo")\n' in made.text


def test_the_end_of_a_script_leaves_a_group_alone_that_a_cell_has_ended() -> None:
    made = script("%%distributed\ndist.destroy_process_group()").text
    assert "\ndist.destroy_process_group()\n" in made
    assert made.rstrip().split("\n")[-3:-1] == [
        "if dist.is_initialized():",
        "    dist.destroy_process_group()",
    ]


def test_a_group_that_is_ended_before_other_cells_is_told() -> None:
    ends, uses = "%%distributed\ndist.destroy_process_group()", "%%distributed\ndist.barrier()"
    (told,) = script(uses, ends, uses).doubts
    assert told.startswith("Cell 2 calls destroy_process_group: the notebook makes the group anew")
    assert script(uses, ends).doubts == ()
    assert script(ends, "%%distributed\ndist.init_process_group()", uses).doubts == ()
    assert script("%%distributed\ndef end(): dist.destroy_process_group()", uses).doubts == ()


ENDS = """
%%writefile helper.py
import torch.distributed as dist
def close(): dist.destroy_process_group()
def done():
    print("done")
    close()
def setup(): dist.init_process_group("gloo")
"""


@pytest.mark.parametrize(
    ("imports", "call"),
    [
        ("import helper", "helper.done"),
        ("import helper as h", "h.close"),
        ("from helper import done as d", "d"),
        ("from helper import *", "done"),
    ],
)
def test_a_group_that_a_module_ends_before_other_cells_is_told(imports: str, call: str) -> None:
    uses = "%%distributed\ndist.barrier()"
    imported, ended = f"%%distributed\n{imports}", f"%%distributed\n{call}()"
    (told,) = script(ENDS, imported, ended, uses).doubts
    assert told.startswith(
        f"Cell 3 calls {call}, and helper.py calls destroy_process_group there: the notebook makes"
    )
    assert script(ENDS, imported, uses, ended).doubts == ()
    assert script(ENDS, imported, uses).doubts == ()


@pytest.mark.parametrize(
    ("imports", "called"),
    [
        ("import pkg", "pkg.done"),
        ("import pkg.end", "pkg.end.done"),
        ("from pkg import end", "end.done"),
    ],
)
def test_functions_of_packages_are_known_by_their_whole_names(imports: str, called: str) -> None:
    text = "def done(): dist.destroy_process_group()"
    block = Block(1, "", f"{imports}\n{called}()"), Block(2, "", "a = 1")
    assert len(ended_early(block, {"pkg/__init__.py": text, "pkg/end.py": text})) == 1
    assert ended_early(block, {}) == []


def test_a_group_that_a_module_makes_anew_is_not_told() -> None:
    sets_up = "%%distributed\nhelper.setup()"
    used = ("%%distributed\nimport helper", "%%distributed\nhelper.done()", sets_up)
    assert script(ENDS, *used).doubts == ()


def test_files_beside_the_script_make_the_group_only_where_there_is_none() -> None:
    written = "%%writefile setup_ranks.py\nimport torch.distributed as dist\ndef f():\n    "
    uses = "%%distributed\nimport setup_ranks"
    told = (
        "\n# As in the notebook, it is taken as done where these make the group: setup_ranks.py\n"
    )
    makes = f"{written}dist.init_process_group()"
    assert told in script(makes, uses).text
    assert told not in script(f"{written}dist.barrier()", uses).text
    assert told not in script(makes, uses, "%%distributed\nnbdist.log(a=1)").text
    assert for_modules({"data.py": ""}) == []
