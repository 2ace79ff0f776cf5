"""The script: cells as they stand, what stays out with its reason, and names that are missing."""

import builtins
import math
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from nbdist.client.export import parts
from nbdist.client.export.cells import NotebookCell
from nbdist.client.export.parts import parts_of
from nbdist.client.export.script import Script, ScriptOptions, write
from nbdist.client.export.sent import Sent, sent
from nbdist.client.notebook.arguments import distributed_parser, parse_distributed


def cells(*sources: str, trouble: dict[int, str] | None = None) -> list[NotebookCell]:
    return [
        NotebookCell(number, dedent(source).strip("\n"), (trouble or {}).get(number, ""))
        for number, source in enumerate(sources, 1)
    ]


def script(
    *made: NotebookCell, chosen: set[int] | None = None, skipped: set[int] | None = None
) -> Script:
    parts = parts_of(made, chosen, skipped or set(), parse_distributed)
    options = ScriptOptions(2, "cpu")
    return write(parts, options, "train.py", "a.ipynb", {}, (), made)


def body(found: Script) -> str:
    """Return the cells of it."""
    return found.text[found.text.index("# Cell") : found.text.index("\n\nimport time")]


def test_cells_of_ranks_stand_there_verbatim_and_in_order() -> None:
    found = script(*cells("x = 1", "%%distributed\na = 1  # one", "%%distributed\n\nprint(a)"))
    assert body(found) == dedent(
        """\
        # Cell 2: %%distributed
        a = 1  # one


        # Cell 3: %%distributed
        print(a)
        """
    )
    assert found.cells == (2, 3)
    assert "import nbdist" not in found.text


def test_what_stays_out_is_a_comment_with_its_reason_and_told_by_reasons() -> None:
    made = cells("%%distributed\na = 1", "%%distributed\n1 / 0", *["%%distributed\nb = 2"] * 3)
    made = cells(
        *(cell.source for cell in made), trouble={2: "failed", 3: "failed", 4: "has not run"}
    )
    found = script(*made, skipped={5})
    assert "# Cell 2 is left out: it failed.\n# %%distributed\n# 1 / 0\n" in found.text
    assert found.left_out_lines == [
        "cells 2, 3: failed",
        "cell 4: has not run",
        "cell 5: is skipped",
    ]


def test_parameters_are_set_and_lists_of_them_are_loops() -> None:
    line = "%%distributed -p lr=[0.1,0.2] -p h=3 -p k=['a']"
    found = script(*cells(f"{line}\nprint(lr, h, k)"))
    space: dict[str, object] = {}
    printed: list[object] = []
    exec(body(found), {"print": lambda *words: printed.append(words)}, space)
    assert printed == [(0.1, 3, "a"), (0.2, 3, "a")]


def test_cells_of_some_ranks_run_on_those_and_fewer_ranks_are_refused() -> None:
    found = script(*cells("%%distributed -r 0,3\n%config x", "%%distributed -r 1\nx = '''a\nb'''"))
    assert "if this_rank in (0, 3):\n    # %config x\n    pass\n" in found.text
    assert "if this_rank == 1:\n    x = '''a\nb'''\n" in found.text
    assert "if world_size < 4:\n    raise SystemExit('train.py needs 4 ranks or more: cell 1" in (
        found.text
    )


def test_options_of_a_cell_that_a_script_does_without_stand_above_it() -> None:
    found = script(*cells("%%distributed --retry 2 --run a\nx = 1"))
    assert (
        "# Cell 1: %%distributed --retry 2 --run a\n"
        "# --retry: a script starts again from nbdist.save and nbdist.restore\n"
        "x = 1\n"
    ) in found.text


def test_chosen_cells_may_be_the_notebooks_own() -> None:
    found = script(*cells("x = 1", "%%distributed\ny = 2", "z = 3"), chosen={1, 2})
    assert body(found) == "# Cell 1\nx = 1\n\n\n# Cell 2: %%distributed\ny = 2\n"


def test_what_was_sent_stands_once_where_it_was_sent_and_says_what_it_has_not() -> None:
    own = NotebookCell(
        1,
        "%dist push k f x",
        sent=(
            Sent("k", (("k", "k = 2"),)),
            Sent("f", (("k", "k = 2"), ("f", "def f():\n    return k"))),
            Sent("x", (), "x is a torch.Tensor, which is no plain value"),
            Sent("r", (("r", "r = 1"),), ranks="1"),
        ),
    )
    found = script(own, *cells("", "%%distributed\nprint(f(), x)"))
    assert body(found).startswith(
        "# Cell 1: sent to the ranks: k, f, x, r\n"
        "# without x: x is a torch.Tensor, which is no plain value\n"
        "k = 2\n\n\ndef f():\n    return k\n\n\nif this_rank == 1:\n    r = 1\n"
    )
    assert found.doubts == ("Nothing in the script gives x, which cell 2 uses.",)


def test_a_name_that_is_sent_again_is_what_it_was_last_and_a_helper_stands_once() -> None:
    values = [Sent("k", (("k", f"k = {value}"),)) for value in (1, 2, 1)]
    ours = [Sent(name, (("h", "h = 0"), (name, f"{name} = 7"))) for name in ("f", "g")]
    own = NotebookCell(1, "p", sent=(*values, *ours))
    assert "k = 1\nk = 2\nk = 1\nh = 0\nf = 7\ng = 7\n" in script(own).text


def test_a_name_that_only_a_cell_left_out_gives_is_told_with_both() -> None:
    made = cells(
        "%%distributed\nx = 1", "%%distributed\nprint(x, rank, device)", trouble={1: "failed"}
    )
    assert script(*made).doubts == (
        "Nothing in the script gives x, which cell 2 uses; cell 1 may, and is not in it.",
    )


def test_a_global_of_a_function_that_was_sent_and_one_of_the_ranks_are_told_to_be_one() -> None:
    own = NotebookCell(1, "%dist push f", sent=(Sent("f", (("k", "k = 2"), ("f", "def f(): k"))),))
    rank = cells("", "%%distributed\nk = 3")
    assert script(own, *rank).doubts == (
        (
            "A function that cell 1 sends reads k, of the notebook, and cell 2 set k, too: in the"
            " script these are one."
        ),
    )
    assert script(own, *cells("", "%%distributed\nf()")).doubts == ()


def test_chosen_cells_bring_no_others_which_are_told_where_a_name_is_missing() -> None:
    sends = NotebookCell(1, "w = 1\n%dist push w", sent=(Sent("w", (("w", "w = 1"),)),))
    found = script(sends, *cells("", "%%distributed\nprint(w)"), chosen={2})
    assert found.cells == (2,)
    assert found.doubts == (
        "Nothing in the script gives w, which cell 2 uses; cell 1 may, and is not in it.",
    )


def test_a_cell_that_awaits_is_a_coroutine_and_its_names_are_the_scripts() -> None:
    made = script(
        *cells("async def make(n): ...", "%%distributed -p n=2\nmodel = await make(n)", "model"),
        chosen={1, 2, 3},
    )
    assert (made.left_out, made.doubts) == ((), ())
    assert (
        "n = 2\nimport asyncio\n\n\nasync def _cell():\n    global model\n"
        "    model = await make(n)\n\n\nasyncio.run(_cell())\n"
    ) in made.text


def test_a_cell_that_awaits_and_fits_in_no_function_says_why_and_what_lacks_then() -> None:
    made = script(
        *cells(
            "%%distributed\nfrom os import *\nmodel = await make()", "%%distributed\nmodel.step()"
        )
    )
    (line,) = made.left_out_lines
    assert line == (
        "cell 1: awaits outside of a function, and a function cannot: import * only allowed at "
        "module level"
    )
    assert made.doubts == (
        "Nothing in the script gives model, which cell 2 uses; cell 1 may, and is not in it.",
    )


def test_a_feature_that_holds_for_cells_above_it_is_told() -> None:
    made = cells("%%distributed\nx = 1", "%%distributed\nfrom __future__ import annotations")
    assert script(*made).doubts == (
        (
            "from __future__ import annotations of cell 2 holds for the whole script, and in the"
            " notebook for the cells below it."
        ),
    )
    assert script(made[1], made[0]).doubts == ()


def test_an_import_that_both_sides_make_is_one() -> None:
    own = NotebookCell(1, "p", sent=(Sent("f", (("m", "import m"), ("f", "def f(): m"))),))
    assert script(own, *cells("", "%%distributed\nimport m")).doubts == ()


def test_a_notebooks_display_is_imported_where_cells_use_it() -> None:
    assert "from IPython.display import display\n" in (
        script(*cells("%%distributed\ndisplay(1)")).text
    )


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("-r 9-", "has a wrong line: "),
        ("-p rank=1", "sets rank, which each rank finds set"),
    ],
)
def test_a_wrong_line_keeps_its_cell_out(line: str, reason: str) -> None:
    (told,) = script(*cells(f"%%distributed {line}\nx = 1")).left_out
    assert told[1].startswith(reason)


def test_code_that_ran_by_other_means_is_said_to_be_missing() -> None:
    made = NotebookCell(1, "session.run('x = 1')", ran_code=True)
    assert script(made, *cells("", "%%distributed\ny = 1")).left_out_lines == [
        "cell 1: ran code on the ranks by other means than %%distributed"
    ]


def test_a_script_with_plain_torch_runs_on_one_rank_of_torchruns(tmp_path: Path) -> None:
    made = cells(
        "%%distributed\nfrom __future__ import annotations\nimport torch.distributed as d\n"
        "d.init_process_group('gloo')\nx = torch.ones(1)\ndist.all_reduce(x)",
        "%%distributed\nprint('sum', x.item(), k)",
    )
    sends = NotebookCell(0, "%dist push k", sent=(sent("k", math.inf),))
    (path := tmp_path / "train.py").write_text(script(sends, *made).text)
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    at = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    ran = subprocess.run(
        [sys.executable, path], env={**place, **at}, capture_output=True, text=True, timeout=200
    )
    assert ran.stdout == "sum 1.0 inf\n", ran.stderr


def test_what_ipython_adds_to_builtins_is_no_builtin_of_a_script(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from IPython.display import display

    monkeypatch.setattr(builtins, "display", display, raising=False)
    text = script(*cells("%%distributed\ndisplay(len([1]))")).text
    assert "from IPython.display import display\n" in text


def test_each_option_of_a_cell_is_written_or_said_to_be_left_out() -> None:
    options = {action.dest for action in distributed_parser()._actions} - {"help"}
    of_the_notebook = {"run", "no_track", "go_on", "ignore", "dry", "n", "memory"}
    assert options == {"ranks", "params"} | of_the_notebook | parts._WITHOUT.keys()
