"""Cells to blocks of plain Python, and to scripts: pure."""

import sys
from collections import OrderedDict

import numpy
import pytest

from nbdist.client.export.modules import beside
from nbdist.client.export.notebook_cells import History, choose, pushed
from nbdist.client.export.resolve import resolve
from nbdist.client.export.script import Script, ScriptOptions, write
from nbdist.client.notebook.arguments import parse_dist, parse_distributed
from nbdist.errors import UsageError
from tests.unit.client.export.exported import cells, code, reasons, resolved, script


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        ("%%distributed -p lr=3e-4\nf(lr);", "lr = 0.0003\nf(lr);"),
        ('%%distributed -p opt="sgd" -p n=(1, 2)\na = 1', "opt = 'sgd'\nn = (1, 2)\na = 1"),
        (
            "%%distributed -p lr=[1e-3,3e-4] -p wd=0.1\na = lr * wd",
            "for lr in [0.001, 0.0003]:\n    wd = 0.1\n    a = lr * wd",
        ),
        (
            "%%distributed -p lr=[1,2] -p wd=[3,4]\na = lr",
            "for lr, wd in [(1, 3), (1, 4), (2, 3), (2, 4)]:\n    a = lr",
        ),
        ("%%distributed -r 1\na = 1", "if rank == 1:\n    a = 1"),
        ("%%distributed -r 0,2-3\na = 1", "if rank in (0, 2, 3):\n    a = 1"),
        ("%%distributed -r 1\na", "if rank == 1:\n    print(a)"),
        ("%%distributed -r 1-2\na", "if rank in (1, 2):\n    if rank == 1:\n        print(a)"),
        ("%%distributed\na = 1\na", "a = 1\nif rank == 0:\n    print(a)"),
        ("%%distributed\na, b", "if rank == 0:\n    print((a, b))"),
        ("%%distributed\n(a, b)", "if rank == 0:\n    print((a, b))"),
        ("%%distributed\n(a, b), a", "if rank == 0:\n    print(((a, b), a))"),
        ("%%distributed\n(a), (b)", "if rank == 0:\n    print(((a), (b)))"),
        ("%%distributed\n(a, b),", "if rank == 0:\n    print(((a, b),))"),
        ("%%distributed\n*a, b;", "*a, b;"),
        ("%%distributed\nf(1)", "_ = f(1)\nif rank == 0 and _ is not None:\n    print(_)"),
        ("%%distributed\nprint(1)", "print(1)"),
        ("%%distributed\na; b  # why", "a\nif rank == 0:\n    print(b)"),
        ("%%distributed\na;", "a;"),
        ("%%distributed\ndef f():\n    print(1)\nf()", "def f():\n    print(1)\nf()"),
        ("%%distributed --no-track --run x\n\n# why\na = 1", "# why\na = 1"),
    ],
)
def test_the_line_of_a_cell_becomes_plain_python(cell: str, expected: str) -> None:
    assert code(cell) == expected


@pytest.mark.parametrize("words", ["", "-r 0", "-r 0-1", "--run x"])
def test_a_cell_of_comments_comes_to_nothing_and_the_rest_is_exported(words: str) -> None:
    made = script(f"%%distributed {words}\n# later: a = 2\n\n# b", "%%distributed\na = 1")
    assert made.cells == (2,)
    assert made.left_out == ()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("-p lr=[1,2]", "for lr in [1, 2]:\n    # why\n    pass"),
        ("-r 0 -p lr=1", "if rank == 0:\n    lr = 1\n    # why\n    pass"),
    ],
)
def test_a_cell_of_comments_still_sets_its_parameters(words: str, expected: str) -> None:
    assert code(f"%%distributed {words}\n# why") == expected


def test_each_run_of_a_sweep_begins_with_its_parameters_set_anew() -> None:
    words = "-p lr=[1.0,2.0] -p seen=[(),({},)] -p bs=8 -p more={}"
    body = "runs.append((lr, len(seen and seen[0]), bs, len(more)))\nlr, bs = lr / 2, bs + 1"
    changes = "more[bs] = 1\nif seen: seen[0][bs] = 1"
    runs: list[tuple[float, ...]] = []
    exec(code(f"%%distributed {words}\n{body}\n{changes}"), {"runs": runs})
    assert runs == [(1.0, 0, 8, 0), (1.0, 0, 8, 0), (2.0, 0, 8, 0), (2.0, 0, 8, 0)]


def test_a_sweep_of_many_combinations_has_a_line_for_each() -> None:
    lists = " ".join(f"-p {name}={list(range(4))}" for name in ("first", "second"))
    lines = code(f"%%distributed {lists}\na = first").split("\n")
    assert lines[:2] == ["for first, second in [", "    (0, 0),"]
    assert lines[-3:] == ["    (3, 3),", "]:", "    a = first"]


def test_texts_over_several_lines_keep_their_lines_where_a_cell_is_indented() -> None:
    text = 'a = """\nleft\n  two\n"""\nb = f"""{\na}\nleft"""'
    namespace: dict[str, object] = {}
    exec(f"rank = 1\n{code(f'%%distributed -r 1{chr(10)}{text}')}", namespace)
    assert namespace["a"] == "\nleft\n  two\n"
    assert namespace["b"] == "\nleft\n  two\n\nleft"


def test_what_is_pushed_becomes_assignments_and_definitions() -> None:
    assert code("names = {0: 'Ada'}\n%dist push names", "%%distributed\nb = names") == (
        "names = {0: 'Ada'}\nb = names"
    )
    found = code(
        "import math\nfrom math import pi\nSIZE = 3\ndef area(r):\n    return SIZE * pi * r\nx = 1",
        "def twice(r):\n    return 2 * area(r)\nimport os",
        "%dist push twice -r 1",
        "%%distributed\nb = twice(2)",
    )
    assert found == (
        "if rank == 1:\n    from math import pi\n\n    SIZE = 3\n\n"
        "    def area(r):\n        return SIZE * pi * r\n\n"
        "    def twice(r):\n        return 2 * area(r)\nb = twice(2)"
    )


FACTOR = "import math\nfactor = 2.0\ndef target(x):\n    return x * factor * math.pi"


@pytest.mark.parametrize(
    "other", ["%%distributed\nfactor = 10.0", "%%distributed -r 1\nfactor = 10.0"]
)
def test_a_function_that_uses_another_value_than_the_ranks_have_stays_out(other: str) -> None:
    found = reasons(FACTOR, other, "%dist push target", "%%distributed\ny = target(1.0)")
    assert found == {
        3: "pushes target, which uses the notebook's factor: the ranks have another",
        4: "uses target, which cell 3 would have given",
    }


def test_names_that_mean_the_same_on_both_sides_are_no_clash() -> None:
    assert not reasons(
        FACTOR,
        "%%distributed\nimport math as math\nfactor = 2.0",
        "%dist push target",
        "%dist push factor",
        "%%distributed\ny = target(1.0)",
    )


def test_a_notebooks_own_device_never_becomes_that_of_the_ranks() -> None:
    found = reasons("device = 'tpu'\ndef f():\n    return device", "%dist push f")
    assert found == {2: "pushes f, which uses the notebook's device: the ranks have another"}


def test_a_value_that_was_pushed_is_what_the_kernel_had_then() -> None:
    history = History()
    for number, value in ((1, 0.5), (2, [1, float("inf")]), (3, object())):
        history.note_push({"x": value})
        history.note_run(number, "%dist push x", f"id {number}", has_failed=False)
    found = resolve(history.cells(), None, parse_dist, parse_distributed).blocks
    assert [one.code for one in found] == ["x = 0.5", "x = [1, float('inf')]", ""]
    assert found[2].reason == "pushes x: an object is no plain value, and no cell defines x"
    assert pushed("word", "infinite").literal == "'infinite'"
    assert pushed("flag", numpy.bool_(True)).why_none == "a numpy.bool is no plain value"


def test_a_kind_of_a_list_or_dict_is_no_plain_value_however_small() -> None:
    sent = pushed("counts", OrderedDict(a=1))
    assert sent.why_none == "a collections.OrderedDict is no plain value"
    named = pushed("version", sys.version_info)
    assert named.why_none == "a sys.version_info is no plain value"
    held = pushed("held", [OrderedDict(a=1)]).why_none
    assert held == "its list is too large, or holds more than plain values"


@pytest.mark.parametrize(
    "value", [{"a": (1.5, [None, "b"])}, (float("-inf"),), {1: float("nan"), (2,): ()}, True]
)
def test_the_literal_of_a_value_that_was_pushed_gives_it_again(value: object) -> None:
    assert repr(eval(pushed("x", value).literal)) == repr(value)


def test_a_value_that_is_too_large_for_a_script_says_so() -> None:
    of = pushed("x", list(range(100_000)))
    assert (of.literal, of.why_none) == (
        "",
        "its list is too large, or holds more than plain values",
    )


def test_of_a_cell_that_was_run_again_the_newest_success_counts_in_the_first_place() -> None:
    history = History()
    history.note_run(1, "first", "a", has_failed=False)
    history.note_run(2, "use", "b", has_failed=True)
    history.note_run(3, "corrected", "a", has_failed=False)
    history.note_run(4, "use", "b", has_failed=False)
    history.note_run(5, "broken", "a", has_failed=True)
    history.note_run(6, "fails", "c", has_failed=True)
    assert [(c.number, c.source, c.has_failed) for c in history.cells()] == [
        (3, "corrected", False),
        (4, "use", False),
        (6, "fails", True),
    ]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("import matplotlib.pyplot as plt", "draws, with matplotlib"),
        ("from plotly import express", "draws, with plotly"),
        ("import ipywidgets", "shows widgets or displays, with ipywidgets"),
        ("from IPython.display import HTML", "shows widgets or displays, with IPython"),
        ("name = input('name')", "asks somebody, with input()"),
        ("display(x)", "calls display(), which only a notebook has"),
        ("nbdist.current()", "calls nbdist.current, which needs a notebook"),
        ("nbdist.publish(model, 'a')", "calls nbdist.publish, which needs a notebook"),
        ("%timeit f()", "has '%timeit f()', which only IPython understands"),
        ("%cd /tmp\nx = 1", "has '%cd /tmp', which only IPython understands"),
        ("%%capture\nx = 1", "has '%%capture', which only IPython understands"),
        ("%dist push x", "has '%dist push x', which only IPython understands"),
        (
            "x = '\0'",
            "is no Python that a script can hold: source code string cannot contain null bytes",
        ),
        ("files = !ls", "has 'files = !ls', which only IPython understands"),
        ("await g()", "awaits at its top level, which a script cannot"),
        ("return 1", "is no Python that a script can hold: 'return' outside function, line 1"),
    ],
)
def test_a_cell_that_no_script_can_hold_says_why_and_the_rest_is_exported(
    body: str, reason: str
) -> None:
    sources = ("%%distributed\na = 1", f"%%distributed\n{body}", "%%distributed\nb = a")
    assert reasons(*sources) == {2: reason}
    made = script(*sources)
    assert made.cells == (1, 3)
    assert made.left_out == ((2, reason),)
    assert f"# Cell 2 is left out: it {reason}." in made.text


@pytest.mark.parametrize(
    ("cell", "expected", "without"),
    [
        ("%%distributed\n%%time\na = 1\na;", "a = 1\na;", ()),
        ("%%distributed\n%time a = 1", "a = 1", ()),
        ("%%distributed\na = %time 1", "a = 1", ()),
        (
            "%%distributed\n%matplotlib inline\n!nvidia-smi\na = 1  # why",
            "pass  # without: %matplotlib inline\npass  # without: !nvidia-smi\na = 1  # why",
            ("%matplotlib inline", "!nvidia-smi"),
        ),
        (
            "%%distributed\nfor i in range(2):\n    !ls {i}\nb = '''\n!ls'''",
            "for i in range(2):\n    pass  # without: !ls {i}\nb = '''\n!ls'''",
            ("!ls {i}",),
        ),
        (
            "%%distributed -r 1\na = 1\na?",
            "if rank == 1:\n    a = 1\n    pass  # without: a?",
            ("a?",),
        ),
    ],
)
def test_a_line_that_only_ipython_understands_is_all_that_a_script_does_without(
    cell: str, expected: str, without: tuple[str, ...]
) -> None:
    made = script(cell)
    assert code(cell) == expected
    assert made.without == (((1, without),) if without else ())
    assert not made.left_out


def test_names_that_a_magic_binds_are_followed() -> None:
    assert reasons("%%distributed\nfiles = !ls\nsize = len(files)", "%%distributed\nsize + 1") == {
        1: "has 'files = !ls', which only IPython understands",
        2: "uses size, which cell 1 would have given",
    }
    assert reasons("%%distributed\n%cd x\n%time a = 1", "%%distributed\na")[2] == (
        "uses a, which cell 1 would have given"
    )


def test_a_pushed_function_keeps_the_future_imports_of_the_notebook() -> None:
    own = "from __future__ import annotations\nSIZE = 2", "def f(x: Unknown):\n    return SIZE"
    made = script(*own, "%dist push f", "%%distributed\nf(1);")
    assert "\nfrom __future__ import annotations\n" in made.text
    assert "__future__" not in script(*own, "%%distributed\na = 1").text


def test_a_definition_of_a_timed_cell_can_be_pushed() -> None:
    assert code("%%time\n!ls\ndef f():\n    return 1", "%dist push f") == "def f():\n    return 1"


def test_a_function_called_top_is_one_like_others() -> None:
    top = "def top(x):\n    y = x + SIZE\n    return y"
    assert reasons(top, "%dist push top")[2].startswith("pushes top: no cell defines SIZE;")
    assert code("SIZE = 2", top, "%dist push top") == f"SIZE = 2\n\n{top}"
    sets = "def top():\n    global n\n    n = n + 1"
    assert code("n = 1", sets, "%dist push top").startswith("n = 1")


def test_cells_that_failed_and_magics_without_meaning_are_left_out() -> None:
    sources = ("%%distributed\na", "%%distributed\nraise ValueError", "%dist chaos kill --faults 1")
    assert reasons(*sources, failed=(2,)) == {
        2: "has failed",
        3: "has '%dist chaos kill --faults 1', which has no meaning in a script",
    }


def test_what_uses_a_name_of_a_cell_that_is_left_out_is_left_out_too() -> None:
    sources = (
        "%%distributed\nimport matplotlib.pyplot as plt\nplt.plot(step())\nsize = 3",
        "%%distributed\ndef f():\n    return size",
        "%%distributed\nf()",
        "%%distributed\nb = 1",
    )
    found = reasons(*sources)
    assert found[3] == "uses f, which reads size, which cell 1 would have given"
    assert {2, 4}.isdisjoint(found), "a function that nobody calls harms nobody"
    assert 5 not in reasons(*sources, "%%distributed\nsize = 4\nsize")


def test_an_older_value_never_stands_in_for_that_of_a_cell_that_is_left_out() -> None:
    first, use = "%%distributed\nlr = 0.1", "%%distributed\nlr * 2"
    found = reasons(first, "%%distributed\n%cd x\nlr = 0.5", use)
    assert found[3] == "uses lr, which cell 2 would have given"
    assert 3 not in reasons(first, "%%distributed\n%cd x\nlr = 0.5", "%%distributed\nlr = 1", use)
    assert 3 not in reasons(first, "%%distributed\nlr = 0.5\n1 / 0", use, failed=(2,))


PLOTS = """\
%%distributed
import torch
import matplotlib.pyplot as plt
import os, seaborn as sns
from IPython.display import clear_output
def plot(values):
    plt.plot(values)
@torch.no_grad()
def show_all():
    plot([1])
a = torch.ones(1)
"""


def test_imports_and_functions_that_draw_are_taken_out_alone() -> None:
    made = script(
        PLOTS, "%%distributed\nb = a + 1", "%%distributed\nplot([b])", "%%distributed\nshow_all()"
    )
    assert made.cells == (1, 2)
    assert made.left_out == ((3, "draws, with matplotlib"), (4, "draws, with matplotlib"))
    assert made.without[0][1] == (
        "import matplotlib.pyplot as plt",
        "import seaborn as sns",
        "from IPython.display import clear_output",
        "def plot(values)",
        "def show_all()",
    )
    assert "\nimport os\n" in made.text
    assert "plt.plot" not in made.text
    assert reasons("%%distributed\nplt = 1", "%%distributed\nplt") == {}


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        (
            ("cfg = {'lr': 1}\ncfg['lr'] = 2", "def f():\n    return cfg"),
            "cfg is changed in the notebook after it is made",
        ),
        (
            ("v = []", "for w in 'ab':\n    v.append(w)", "def f():\n    return v"),
            "v is changed in the notebook after it is made",
        ),
        (
            ("class A:\n    pass\nA.x = 1", "def f():\n    return A"),
            "A is changed in the notebook after it is made",
        ),
        (
            ("LR = 1\ndef f(x=LR):\n    return x", "LR = 2"),
            "LR is set again after f was made with it",
        ),
        (("LR = 1\nclass f:\n    lr = LR", "LR = 2"), "LR is set again after f was made with it"),
    ],
)
def test_a_push_that_stands_on_what_has_changed_since_stays_out(
    cells: tuple[str, ...], reason: str
) -> None:
    number = len(cells) + 1
    found = reasons(*cells, "%dist push f")
    assert found[number].startswith(f"pushes f: {reason}")


def test_a_pushed_function_brings_the_globals_that_it_sets() -> None:
    found = code("count = 0\ndef f():\n    global count\n    count += 1", "%dist push f")
    assert found.startswith("count = 0\n\ndef f():")


def test_imports_of_one_name_from_two_modules_are_a_clash() -> None:
    own = "from math import exp\ndef f(x):\n    return exp(x)", "%dist push f"
    found = reasons(*own, "%%distributed\nfrom torch import exp")
    assert found[2] == "pushes f, which uses the notebook's exp: the ranks have another"


def test_names_of_a_rank_that_a_cell_takes_break_nothing() -> None:
    made = script(
        "%%distributed\nrank = 3\ndist = 1", "%%distributed -r 1\na = 1", "%%distributed\na"
    )
    assert "\nthis_rank = rank  # which a cell takes for something else\n" in made.text
    assert "if this_rank == 1:\n    a = 1" in made.text
    assert "if this_rank == 0:\n    print(a)" in made.text
    again = "\nimport time\n\nimport torch.distributed as dist\n\nif dist.is_initialized():\n"
    assert again in made.text


def test_names_that_nothing_gives_and_cells_that_ran_twice_are_told() -> None:
    history = History()
    for number in (1, 2):
        history.note_run(number, "%%distributed\na = b + len(c)", "id", has_failed=False)
    found = resolve(history.cells(), None, parse_dist, parse_distributed)
    made = write(found, ScriptOptions(2, "cpu"), "train.py", "", {})
    assert made.repeated == ((2, 2),)
    assert made.not_given == ((2, ("b", "c")),)
    assert script("%%distributed\nfrom math import *\nsqrt(2)").not_given == ()


def test_values_without_a_literal_of_their_own_are_written_as_parameters() -> None:
    assert code("%%distributed -p a=[1e999,1]\na").startswith("for a in [float('inf'), 1]:")


def test_a_cell_that_failed_first_stands_where_it_succeeded() -> None:
    history = History()
    history.note_run(1, "use", "a", has_failed=True)
    history.note_run(2, "define", "b", has_failed=False)
    history.note_run(3, "use", "a", has_failed=False)
    assert [cell.source for cell in history.cells()] == ["define", "use"]


def test_ranks_that_only_the_kernel_knows_leave_a_cell_out() -> None:
    assert reasons("%%distributed -r {r}\na = 1", "%%distributed\nb = 1")[1].startswith(
        "has a wrong line"
    )


def test_a_cell_that_was_retried_stands_where_it_succeeded() -> None:
    sources = ("%%distributed\na = b", "b = 1\n%dist push b\n%dist retry")
    found = resolved(*sources, failed=(1,)).blocks
    assert [one.code for one in found if not one.is_notebooks] == ["b = 1", "a = b"]


def test_a_script_without_nbdist_is_plain_torch() -> None:
    made = script("%%distributed\nx = torch.ones(1)", "%%distributed -r 2\nx += 1", n=3)
    assert not made.needs_nbdist
    assert "nbdist" not in made.text.split('"""')[2]
    assert 'dist.init_process_group("gloo")' in made.text
    assert "train.py needs 3 ranks or more: cell 2 runs on rank 2." in made.text
    assert "\n    dist.destroy_process_group()\ntime.sleep(0.1)  # gloo" in made.text
    with pytest.raises(SystemExit, match="Start workers by fork"):
        exec(made.text, {"__name__": "__mp_main__"})  # as spawned processes run it first
    assert made.command == "torchrun --nproc-per-node 3 train.py"


def test_a_script_tells_the_layouts_that_it_will_ask_for() -> None:
    made = script(
        '%%distributed\nlayout = nbdist.parallelize(model, "fsdp=2 tp=2")',
        '%%distributed\nwords = ["ddp", "dp=-1 zero2", "lr=3", "tp=4", "zero3", "a tp=2 b"]',
    )
    assert made.needs_nbdist
    assert 'nbdist.init(layouts=["fsdp=2 tp=2", "tp=4"], device="cpu")' in made.text


def test_a_module_that_a_cell_wrote_is_named_where_it_is_used() -> None:
    written = "%%writefile digits_training.py\nimport nbdist\nLAYOUT = 'tp=2'"
    made = script(written, "%%distributed\nfrom digits_training import train\ntrain()")
    assert made.modules == ("digits_training.py",)
    assert made.needs_nbdist
    assert "It needs beside it: digits_training.py." in made.text
    assert "layouts=[" in made.text
    assert script(written, "%%distributed\na = 1").modules == ()


def test_options_that_a_script_does_without_are_told_at_the_cell() -> None:
    text = script("%%distributed --retry 1 --checkpoint every=10\na = 1").text
    assert "# --checkpoint: call nbdist.save() in the loop" in text
    assert "# --retry: a script starts again" in text


def test_chosen_cells_alone_are_exported_the_notebooks_own_too() -> None:
    found = resolved("a = 1", "%%distributed\nb = 1", "%%distributed\nc = 1", chosen=(1, 3))
    assert [one.code for one in found.blocks] == ["a = 1", "c = 1"]
    known = cells("a", "b", "c")
    assert choose(known, "3,1-2") == [1, 2, 3]
    for text, told in (("4", "there is no cell 4; cells are 1 to 3"), ("x", "numbers of cells")):
        with pytest.raises(UsageError, match=told):
            choose(known, text)


@pytest.mark.parametrize("cell_id", [None, "one cell"])
def test_each_retry_belongs_to_the_newest_cell_that_failed(cell_id: str | None) -> None:
    history = History()
    history.note_run(1, "%dist retry", cell_id, has_failed=True)  # there is nothing to retry
    history.note_run(2, "%%distributed\none = 1", "a", has_failed=True)
    history.note_run(3, "%dist retry", cell_id, has_failed=False)
    history.note_run(4, "%%distributed\ntwo = 2", "b", has_failed=True)
    history.note_run(5, "%dist retry", cell_id, has_failed=False)
    found = resolve(history.cells(), None, parse_dist, parse_distributed).blocks
    assert [(one.number, one.code) for one in found] == [(3, "one = 1"), (5, "two = 2")]


def test_a_retry_of_a_cell_that_had_succeeded_before_is_not_taken_for_another_one() -> None:
    history = History()
    history.note_run(1, "%%distributed\none = 1", "a", has_failed=False)
    history.note_run(2, "%%distributed\ntwo = 2", "b", has_failed=True)
    history.note_run(3, "%%distributed\none = 1", "a", has_failed=True)
    history.note_run(4, "%dist retry", "c", has_failed=False)
    found = resolve(history.cells(), None, parse_dist, parse_distributed).blocks
    assert [one.code for one in found] == ["one = 1", ""]


def test_features_of_the_language_stand_above_the_script() -> None:
    text = script(
        "%%distributed -p lr=1\n# why\nfrom __future__ import annotations; a = 1\nb = 1",
        "%%distributed\nc = 1",
    ).text
    assert text.split('"""')[2].startswith("\n\nfrom __future__ import annotations\n\n\nimport os")
    assert "lr = 1\n# why\na = 1\nb = 1" in text


@pytest.mark.parametrize("above", ["%%time", "%%capture out", "%%time\n%%capture"])
def test_a_cell_of_ranks_below_what_times_or_captures_is_one(above: str) -> None:
    assert code(f"{above}\n%%distributed\nf()") == code("%%distributed\nf()") != ""
    other = reasons("%%debug\n%%distributed\nlr = 1", "%%distributed\nlr")
    assert other == {1: "is a cell of %%debug", 2: "uses lr, which cell 1 would have given"}


def test_a_function_that_reads_what_a_cell_left_out_would_have_given_is_no_older_one() -> None:
    found = reasons(
        "%%distributed\nlr = 0.1\ndef step(): return lr\ndef twice(): return 2 * step()",
        "%%distributed\nlr = 0.3\ninput()",
        "%%distributed\nprint(twice())",
        "%%distributed\nlr = 0.5\nprint(twice())",
    )
    reads = "uses twice, which reads step, which reads lr, which cell 2 would have given"
    assert found.keys() == {2, 3}
    assert found[3] == reads


def history(*ran: tuple[str, dict[str, object], bool]) -> History:
    """Return the history of cells, each of a source, what it sent, and whether it failed."""
    found = History()
    for number, (source, sent, has_failed) in enumerate(ran, 1):
        for name, value in sent.items():
            found.note_push({name: value})
        found.note_run(number, source, source.partition("\n")[0], has_failed=has_failed)
    return found


def of_history(found: History) -> Script:
    known = resolve(found.cells(), None, parse_dist, parse_distributed)
    modules = beside(known.code, known.written, None)
    return write(known, ScriptOptions(2, "cpu"), "train.py", "", modules)


def test_a_value_that_a_failed_cell_may_have_set_anew_is_told() -> None:
    found = script(
        "%%distributed\nlr = 0.1",
        "%%distributed -p lr=0.2\nprint(lr)",
        "%%distributed\nprint(lr)",
        failed=(2,),
    )
    told = "Cell 3 uses lr as cell 1 gave it; cell 2, which has failed, may have set it anew."
    assert found.doubts == (told,)
    assert told in found.text


def test_a_cell_that_failed_before_it_succeeded_is_told() -> None:
    found = History()
    found.note_run(1, "%%distributed\nstep(losss)", "a", has_failed=True)
    found.note_run(2, "%%distributed\nstep()", "a", has_failed=False)
    (told,) = of_history(found).doubts
    assert told.startswith("Cell 2 failed before it succeeded: what it had changed by then")


@pytest.mark.parametrize(
    ("source", "has_failed"),
    [
        ("if debug:\n    lr = 7.0\n    %dist push lr", False),
        ("lr = 7.0\n%dist push lr\nraise RuntimeError", True),
        ("%time %dist push lr", False),
        ('session.push({"lr": 7.0})', False),
    ],
)
def test_what_the_kernel_has_sent_is_in_the_script_however_it_was_sent(
    source: str, has_failed: bool
) -> None:
    text = of_history(history((source, {"lr": 7.0}, has_failed), ("%%distributed\nlr", {}, False)))
    assert "\nlr = 7.0\n" in text.text


def test_a_name_that_a_cell_sends_twice_has_each_value_in_turn() -> None:
    found = History()
    for value in (0.1, 0.2):
        found.note_push({"lr": value})
    found.note_run(1, "lr = 0.1\n%dist push lr\nlr = 0.2\n%dist push lr", None, has_failed=False)
    found.note_run(2, "%%distributed\nlr", None, has_failed=False)
    text = of_history(found).text
    assert text.index("lr = 0.1") < text.index("lr = 0.2")


def test_ranks_that_a_value_was_sent_to_are_those_that_get_it() -> None:
    found = History()
    found.note_push({"lr": 0.1}, "1")
    found.note_run(1, 'session.push({"lr": 0.1}, "1")', None, has_failed=False)
    found.note_run(2, "%%distributed\nlr", None, has_failed=False)
    assert "if rank == 1:\n    lr = 0.1" in of_history(found).text


def test_code_that_ranks_ran_past_the_magic_is_told_and_gives_nothing() -> None:
    found = History()
    found.note_run(1, "%%distributed\nscale = 1.0", None, has_failed=False)
    found.note_code("scale = 3.0")
    found.note_run(2, "%dist run conf.py", None, has_failed=False)
    found.note_run(3, "%%distributed\nprint(scale)", None, has_failed=False)
    assert of_history(found).left_out == (
        (2, "has run code on the ranks by other means than %%distributed"),
        (3, "uses scale, which cell 2 would have given"),
    )


def test_a_cell_that_ran_code_on_ranks_in_a_loop_is_told_once() -> None:
    found = History()
    for ran in ("a = 1", "b = (", "torch.manual_seed(0)\nb = 2"):
        found.note_code(ran)
    found.note_run(1, "for code in codes:\n    session.run(code)", None, has_failed=False)
    found.note_run(2, "%%distributed\nprint(a)", None, has_failed=False)
    found.note_run(3, "%%distributed\nprint(b)", None, has_failed=False)
    found.note_run(4, "%%distributed\nc = 1", None, has_failed=False)
    made = of_history(found)
    assert made.left_out == (
        (1, "has run code on the ranks by other means than %%distributed"),
        (2, "uses a, which cell 1 would have given"),
        (3, "uses b, which cell 1 would have given"),
    )
    assert made.text.count("# Cell 1 is left out") == 1


def test_a_file_that_ranks_ran_is_told_where_no_kernel_knows_its_code() -> None:
    assert reasons("%dist run conf.py", "%%distributed\n1") == {1: "runs conf.py on the ranks"}


def test_a_module_that_was_written_again_is_told() -> None:
    found = History()
    for scale in (1, 100):
        source = f"%%writefile netmod.py\nSCALE = {scale}"
        found.note_run(scale, source, "a", has_failed=False)
    found.note_run(101, "%%distributed\nimport netmod", "b", has_failed=False)
    told = "netmod.py was written more than once: the script imports it as it is now."
    assert of_history(found).doubts == (told,)


def test_what_a_cell_left_out_has_shown_is_no_older_output() -> None:
    found = reasons(
        "%%distributed\nsum([1, 2])", "%%distributed\ninput()\n40 + 1", "%%distributed\n_ + 1"
    )
    assert found[3] == "uses _, which cell 2 would have given"


TRAINS_AND_DRAWS = """\
%%distributed
import matplotlib.pyplot as plt
losses = [step() for _ in range(3)]
fig, axes = plt.subplots(1, 2)
axes[0].plot(range(len(losses)), [loss.item() for loss in losses])
for ax, name in zip(axes, "ab"):
    ax.set_title(f"{name}: {losses[-1]:.3f}")
plt.show()
display(fig)
print(losses)
"""


def test_what_draws_below_a_training_is_taken_out_alone() -> None:
    (block,) = resolved(TRAINS_AND_DRAWS).blocks
    kept = [line for line in block.code.split("\n") if line and not line.startswith("pass  #")]
    assert kept == ["losses = [step() for _ in range(3)]", "print(losses)"]
    assert "axes[0].plot" in block.without[2]
    later = reasons(TRAINS_AND_DRAWS, "%%distributed\nprint(len(losses))\nsave(fig)")
    assert later == {2: "draws, with matplotlib"}


@pytest.mark.parametrize(
    "draws",
    [
        "plt.plot(step())",
        "plt.plot(model(x).detach())",
        "plt.plot(losses := [1])",
        "plt.plot(next(batches))",
        "plt.plot(list(map(step, batches)))",
        "for x in batches:\n    loss = step(x)\n    plt.plot(loss)",
        "if step():\n    plt.plot(1)",
        "values = f(plt)",
    ],
)
def test_a_statement_that_may_do_more_than_draw_keeps_its_cell_out(draws: str) -> None:
    cell = f"%%distributed\nimport matplotlib.pyplot as plt\na = 1\n{draws}"
    assert reasons(cell) == {1: "draws, with matplotlib"}


LEFT_OUT = "%%distributed\nfiles = !ls\nw = 2\nk = 10\ndef f(): return 100"


@pytest.mark.parametrize(
    ("user", "name"),
    [
        ("w = w * 2\nprint(w)", "w"),
        ("w += 1", "w"),
        ("def g(): return f() + 1\nf = f\nprint(g())", "f"),
        ("for k in range(k): pass", "k"),
        ("if rank == 9: w = 50\nprint(w)", "w"),
        ("if rank == 9: w = 50\nelse: raise ValueError(w)", "w"),
        ("try: w = int('1')\nexcept ValueError: pass\nprint(w)", "w"),
        ("print([w for _ in range(2)])\nw = 1", "w"),
        ("class A:\n    w = w", "w"),
        ("del w", "w"),
        ("match 3:\n    case 1: w = 1\nprint(w)", "w"),
        ("w: int\nprint(w)", "w"),
    ],
)
def test_a_cell_that_reads_a_left_out_name_before_it_binds_it_stays_out(
    user: str, name: str
) -> None:
    before = "%%distributed\nw = k = 1\ndef f(): return 1"
    found = reasons(before, LEFT_OUT, f"%%distributed\n{user}")
    assert found[3] == f"uses {name}, which cell 2 would have given"


@pytest.mark.parametrize(
    "user",
    [
        "w = 1\nprint(w)",
        "for w in range(3): pass\nprint(w)",
        "for i in range(3):\n    w = i\nprint(w)",
        "while True:\n    w = 1\n    break\nprint(w)",
        "if rank: w = 1\nelse: w = 2\nprint(w)",
        "if rank: w = 1\nelse: raise ValueError\nprint(w)",
        "try: w = int('1')\nexcept ValueError: w = 2\nprint(w)",
        "with torch.no_grad() as w: print(w)",
        "if (w := 3) and w: print(w)",
        "print([w for w in range(2)], lambda w: w)",
        "match 3:\n    case w: print(w)",
        "def g(w): return w\nprint(g(1))",
        "import os as w\nprint(w)",
        "class A:\n    w = 1\n    v = w",
    ],
)
def test_a_cell_that_binds_a_left_out_name_before_it_reads_it_is_in_the_script(user: str) -> None:
    assert set(reasons("%%distributed\nw = 1", LEFT_OUT, f"%%distributed\n{user}")) == {2}


def test_a_name_that_may_have_been_bound_anew_may_still_be_the_left_out_cells() -> None:
    maybe = "%%distributed\nif rank == 0: w = 5"
    found = reasons("%%distributed\nw = 1", LEFT_OUT, maybe, "%%distributed\nprint(w)")
    assert found == {
        2: "has 'files = !ls', which only IPython understands",
        4: "uses w, which cell 2 would have given",
    }


NET = (
    "%%distributed\n"
    "def act(x): return x\n"
    "class Net(torch.nn.Module):\n"
    "    def forward(self, x): return act(x)\n"
)
NEW_ACT = "%%distributed\nfree = !df\ndef act(x): return -x"


@pytest.mark.parametrize(
    ("made", "used"),
    [
        ("model = Net()", "model(1)"),
        ("model = torch.nn.Sequential(torch.nn.Linear(2, 2), Net())", "model(1)"),
        ("models = []\nmodels.append(Net())", "models[0](1)"),
        ("model = torch.nn.Linear(2, 2)\nmodel.last = Net()", "model(1)"),
        ("first = Net()\nmodel = first", "model(1)"),
        ("model = Net()", "for x in [1]: y = model(x)"),
    ],
)
def test_an_object_whose_class_calls_what_a_left_out_cell_defined_anew_stays_out(
    made: str, used: str
) -> None:
    name = "models" if "models" in made else "model"
    for cell in (NET + made, f"{NET}\x00%%distributed\n{made}"):
        found = reasons(*cell.split("\x00"), NEW_ACT, f"%%distributed\n{used}")
        number = cell.count("\x00") + 3
        assert found[number] == (
            f"uses {name}, which reads act, which cell {number - 1} would have given"
        )


def test_what_a_model_does_with_a_function_that_a_failed_cell_may_have_changed_is_told() -> None:
    failing = "%%distributed\ndef act(x): return -x\nmodle.train()"
    made = script(f"{NET}model = Net()", failing, "%%distributed\nmodel(1)", failed=(2,))
    assert made.doubts == (
        "Cell 3 uses act as cell 1 gave it; cell 2, which has failed, may have set it anew.",
    )


def test_a_value_whose_maker_has_changed_since_needs_nothing_of_a_left_out_cell() -> None:
    before = "%%distributed\ndef scale(x): return 2 * x\nk = 3\ny = scale(k)"
    found = reasons(before, "%%distributed\nfree = !df\nk = 4", "%%distributed\nprint(y)")
    assert set(found) == {2}


def test_what_a_rank_has_by_itself_is_not_missed_where_a_later_cell_would_set_it() -> None:
    found = reasons("%%distributed\na = rank", "%%distributed\nb = !ls\nrank = 5")
    assert set(found) == {2}


def test_a_text_that_the_program_may_not_choose_demands_no_ranks() -> None:
    cell = '%%distributed\nnbdist.parallelize(m, "fsdp=2" if world_size == 2 else "fsdp=4")'
    assert "nbdist.init(device" in script("%%distributed\nm = 1", cell).text


def test_a_programs_own_underscore_stays_what_it_is() -> None:
    made = code("%%distributed\n_, i = 1, 2\nf(i)", "%%distributed\nf(_)")
    assert "\n_ =" not in made
    assert made.count("_shown = f(") == 2


def test_all_ranks_compute_what_a_cell_shows_last() -> None:
    # A property, or a sum of sharded tensors, may be a collective.
    assert code("%%distributed\nx.total") == (
        "_ = x.total\nif rank == 0 and _ is not None:\n    print(_)"
    )


@pytest.mark.parametrize(
    "user",
    [
        "a = f()\nw = 5",
        "for i in range(3):\n    a = f()\n    w = 5",
        "def late(): return w\nq = late()\nw = 9",
        "late = lambda: w\nq = late()\nw = 9",
    ],
)
def test_a_name_that_is_looked_up_before_the_cell_binds_it_is_the_left_out_cells(user: str) -> None:
    before = "%%distributed\nw = 1\ndef f(): return w"
    found = reasons(before, "%%distributed\nfiles = !ls\nw = 2", f"%%distributed\n{user}")
    assert found[3].endswith("which cell 2 would have given")


def test_a_name_that_a_function_reads_counts_where_it_is_called() -> None:
    left_out = "%%distributed\nfiles = !ls\nw = 2"
    later = "%%distributed\nw = 3\nprint(train())"
    assert set(reasons(left_out, "%%distributed\ndef train(): return w", later)) == {1}
    in_one = "%%distributed\ndef train(): return w\nw = 3\nprint(train())"
    assert set(reasons(left_out, in_one)) == {1}


def test_a_left_out_cell_that_imports_the_same_once_more_keeps_nobody_out() -> None:
    left_out = "%%distributed\nimport numpy as np\nimport torch\nfiles = !ls"
    uses = "%%distributed\nprint(np.zeros(2), torch.ones(2))"
    assert set(reasons("%%distributed\nimport numpy as np", left_out, uses)) == {2}
    assert reasons("%%distributed\nimport numpy.random as np", left_out, uses)[3] == (
        "uses np, which cell 2 would have given"
    )
    assert reasons(left_out, uses)[2] == "uses np, which cell 1 would have given"
    assert set(reasons(left_out, "%%distributed\nprint(torch.ones(2))")) == {1}


@pytest.mark.parametrize("drawing", ["plt.plot(losses);", "plt.plot(losses); plt.show()"])
def test_a_drawing_statement_with_a_semicolon_goes_alone(drawing: str) -> None:
    made = code(
        "%%distributed\nimport os; import matplotlib.pyplot as plt",
        f"%%distributed\nlosses = [1]\na = 1; b = 2;\n{drawing}",
    )
    assert "import os\n" in made
    assert "losses = [1]\na = 1\nb = 2;\n" in made
    assert "plt" not in made.replace("# without: import matplotlib.pyplot as plt", "").replace(
        "# without: plt", ""
    )


def test_of_an_import_of_several_only_what_draws_is_said_to_be_gone() -> None:
    made = script("%%distributed\nimport os, matplotlib.pyplot as plt\nprint(os)")
    assert made.without == ((1, ("import matplotlib.pyplot as plt",)),)
    assert "\nimport os\n" in made.text
