"""What a cell shows in the notebook while it runs, and what it leaves in the file."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.conftest import Kernel, Ran, saved_outputs

WIDGET = "application/vnd.jupyter.widget-view+json"


def test_what_ranks_say_alike_appears_once_and_the_rest_rank_by_rank(notebook: Kernel) -> None:
    ran = notebook.cell("print('epoch 1')\nprint(f'loss 0.{rank}')\nprint('epoch 2')")
    assert ran.text.splitlines() == [
        "ranks 0-1 │ epoch 1",
        "rank 0    │ loss 0.0",
        "rank 1    │ loss 0.1",
        "ranks 0-1 │ epoch 2",
    ]


def test_the_value_of_a_cell_is_shown_and_a_semicolon_hides_it(notebook: Kernel) -> None:
    assert notebook.cell("rank * 10").text.splitlines() == ["rank 0 │ Out: 0", "rank 1 │ Out: 10"]
    assert notebook.cell("'same'").text == "ranks 0-1 │ Out: 'same'"
    assert notebook.cell("rank * 10;").outputs == []
    assert notebook.cell("x = 1").outputs == []


def test_the_first_line_is_shown_while_the_cell_still_runs(notebook: Kernel) -> None:
    gate = notebook.folder / "seen"
    code = f"""
import pathlib, time
print("first")
while not pathlib.Path({str(gate)!r}).exists(): time.sleep(0.01)
print("last")
"""
    ran = notebook.cell(code, interrupt_after=["first"], then=gate.touch)
    assert ran.error is None
    assert "first" in ran.live[0]
    assert "last" not in ran.live[0]
    assert ran.text.splitlines() == ["ranks 0-1 │ first", "          │ last"]


def test_a_display_stands_between_the_texts_around_it(notebook: Kernel) -> None:
    code = """
from IPython.display import HTML, display
print("before")
display(HTML("<b>bold</b>"))
print("after")
"""
    ran = notebook.cell(code)
    assert ran.mimes == [["text/plain"], ["text/html", "text/plain"], ["text/plain"]]
    texts = [o["data"]["text/plain"] for o in ran.outputs]
    assert "before" in texts[0]
    assert "after" in texts[2]
    assert ran.outputs[1]["data"]["text/html"] == "<b>bold</b>"


def test_of_figures_that_differ_rank_0s_is_shown_and_the_others_on_demand(
    notebook: Kernel,
) -> None:
    code = """
%matplotlib inline
import matplotlib.pyplot as plt
plt.plot([rank, 1])
plt.show()
"""
    ran = notebook.cell(code)
    assert ran.error is None
    figures = [kinds for kinds in ran.mimes if "image/png" in kinds]
    assert len(figures) == 1
    assert "rank 1" in ran.text
    assert "nbdist.current().last[1].show()" in ran.text
    shown = notebook.run("import nbdist\nnbdist.current().last[1].show()")
    assert ["image/png", "text/plain"] in shown.mimes


def test_a_figure_left_open_is_shown_at_the_end_of_the_cell(notebook: Kernel) -> None:
    ran = notebook.cell("%matplotlib inline\nimport matplotlib.pyplot as p\n_ = p.plot([1, 2])")
    assert any("image/png" in kinds for kinds in ran.mimes)


def test_an_html_repr_is_shown_as_html(notebook: Kernel) -> None:
    code = "class Table:\n    def _repr_html_(self): return '<table></table>'\nTable()"
    ran = notebook.cell(code)
    assert any("text/html" in kinds for kinds in ran.mimes)


def test_a_display_that_is_updated_keeps_its_place(notebook: Kernel) -> None:
    code = """
from IPython.display import display
handle = display("old", display_id=True)
print("after")
handle.update("new")
"""
    ran = notebook.cell(code)
    assert "'old'" not in ran.text
    assert ran.text.index("'new'") < ran.text.index("after")


def test_clear_output_clears_what_the_rank_said(notebook: Kernel) -> None:
    code = "from IPython.display import clear_output\nprint('gone')\nclear_output()\nprint('here')"
    assert notebook.cell(code).text == "ranks 0-1 │ here"


def test_a_cell_that_is_silent_shows_that_it_runs_and_leaves_nothing_of_it(
    notebook: Kernel,
) -> None:
    gate = notebook.folder / "seen-running"
    code = f"import pathlib, time\nwhile not pathlib.Path({str(gate)!r}).exists(): time.sleep(0.05)"

    ran = notebook.cell(code, interrupt_after=["Running on ranks 0-1."], then=gate.touch)

    assert ran.error is None, ran.error
    assert ran.outputs == []


def test_below_what_a_plain_cell_printed_nothing_passes(notebook: Kernel) -> None:
    ran = notebook.run(
        "import nbdist\nprint('mine')\n"
        "_ = nbdist.current().run('import time; time.sleep(1)', show=True)"
    )

    assert ran.error is None, ran.error
    assert ran.text.strip() == "mine"
    assert not any("Running on" in str(message) for _, message in ran.messages)


def test_tqdms_notebook_bar_leaves_no_dead_widget(notebook: Kernel) -> None:
    code = """
from tqdm.notebook import tqdm
for i in tqdm(range(20), desc="work"): pass
print("done")
"""
    ran = notebook.cell(code)
    assert ran.error is None, ran.error
    assert not any(WIDGET in kinds for kinds in ran.mimes)
    assert "done" in ran.text
    assert "work" in ran.text


def test_a_widget_leaves_its_text_and_no_dead_view(notebook: Kernel) -> None:
    ran = notebook.cell("import ipywidgets\nipywidgets.IntSlider(value=7)")
    assert ran.error is None, ran.error
    assert not any(WIDGET in kinds for kinds in ran.mimes)
    assert "IntSlider(value=7)" in ran.text


def test_a_page_that_is_opened_again_in_mid_training_holds_words_and_from_when_they_are(
    notebook: Kernel,
) -> None:
    gate = notebook.folder / "reloaded"
    code = f"""
import pathlib
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
enough = torch.tensor(False)
while not enough:
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    enough = torch.tensor(pathlib.Path({str(gate)!r}).exists())
    dist.all_reduce(enough.byte())
    dist.broadcast(enough, 0)
"""
    ran = notebook.cell(
        code, "--no-track", interrupt_after=["The board as it was at "], then=gate.touch
    )
    assert ran.error is None, ran.error
    shown = [message for _, message in ran.messages]
    kept_at = next(
        place
        for place, message in enumerate(shown)
        if "The board as it was at" in message["content"].get("data", {}).get("text/plain", "")
    )
    widget, kept = saved_outputs(shown[: kept_at + 1])[-2:]
    assert set(widget["data"]) == {WIDGET, "text/plain"}
    assert widget["data"]["text/plain"].startswith("This cell trains.")
    assert set(kept["data"]) == {"text/html", "text/plain"}
    assert "Step " in kept["data"]["text/plain"]
    updates = [m["content"] for m in shown if m["msg_type"] == "update_display_data"]
    assert not any(WIDGET in content["data"] for content in updates)
    assert not any("The board as it was" in o["data"].get("text/plain", "") for o in ran.outputs)
    assert not any(WIDGET in kinds for kinds in ran.mimes)


def test_a_failed_rank_comes_first(notebook: Kernel) -> None:
    ran = notebook.cell("print(f'rank {rank} says')\nif rank == 1: raise ValueError('bad')")
    assert ran.text.splitlines()[0].startswith("rank 1")
    assert ran.error is not None
    name, _, shown = ran.error
    assert name == "RankError"
    assert "rank 1 (localhost, cpu)" in shown
    assert "ValueError" in shown
    assert "nbdist/client" not in shown


def test_a_failed_cell_stops_run_all(notebook: Kernel) -> None:
    ran = notebook.run("raised = True\nget_ipython().run_cell_magic('distributed', '', '1/0')\n1")
    assert ran.error is not None


def test_a_syntax_error_is_shown_as_python_shows_it(notebook: Kernel) -> None:
    ran = notebook.cell("x = 1\nif x print(x)")
    assert ran.error is not None
    name, _, shown = ran.error
    assert name == "CellSyntaxError"
    assert "if x print(x)" in shown
    assert "^" in shown


FLOOD = "if rank == 0:\n    for i in range(400_000): print(f'{i:>49}')\nprint('end')"


def test_twenty_megabytes_leave_a_small_cell_that_says_where_the_whole_is(
    notebook: Kernel,
) -> None:
    ran = notebook.cell(FLOOD, timeout_s=90)
    assert ran.error is None
    assert ran.size < 2_000_000
    saved = json.dumps(ran.outputs)
    assert len(saved) < 100_000
    said = re.search(r"lines not shown; the whole is kept: (\S+)", ran.text)
    assert said
    whole = notebook.folder / said.group(1)
    lines = whole.read_text().splitlines()
    assert len(lines) == 400_001
    assert [line.strip() for line in lines[:2] + lines[-2:]] == ["0", "1", "399999", "end"]
    assert f"{399_999:>49}" in ran.text
    assert notebook.cell("rank").error is None


def test_one_line_of_many_megabytes_is_cut(notebook: Kernel) -> None:
    ran = notebook.cell("print('x' * 20_000_000)", timeout_s=90)
    assert ran.error is None
    assert len(json.dumps(ran.outputs)) < 100_000
    assert "characters more" in ran.text or "not shown" in ran.text


def test_a_huge_value_is_cut_too(notebook: Kernel) -> None:
    ran = notebook.cell("list(range(3_000_000))", timeout_s=90)
    assert ran.error is None
    assert len(json.dumps(ran.outputs)) < 200_000


@pytest.fixture
def static(notebook: Kernel) -> Iterator[Kernel]:
    notebook.run("%env NBDIST_STATIC=1")
    yield notebook
    notebook.run("%env NBDIST_STATIC=0")


SAME = {
    "text": "print('a'); print(rank); print('b')",
    "a value": "rank",
    "a display": "from IPython.display import HTML\nprint(1); display(HTML('<i>x</i>')); print(2)",
    "progress": "from tqdm import trange\nimport io\nfor _ in trange(9, file=io.StringIO()): pass",
    "nothing": "x = 1",
    "many lines": "for i in range(1000): print(i)",
    "streams": "import sys\nprint('out'); print('err', file=sys.stderr)",
    "unicode": "print('é中🙂')",
}


@pytest.mark.parametrize("code", SAME.values(), ids=SAME)
def test_static_and_live_cells_leave_the_same(notebook: Kernel, code: str) -> None:
    live = notebook.cell(code)
    try:
        notebook.run("%env NBDIST_STATIC=1")
        first, second = notebook.cell(code), notebook.cell(code)
    finally:
        notebook.run("%env NBDIST_STATIC=0")
    assert first.outputs == second.outputs == live.outputs
    assert not any(m["msg_type"] == "update_display_data" for _, m in first.messages)


def test_an_error_reads_the_same_live_and_static(notebook: Kernel) -> None:
    def shown(ran: Ran) -> str:
        assert ran.error is not None
        return re.sub(
            r"(Cell In ?\[|cell )\d+", "cell N", re.sub(r"\x1b\[[0-9;]*m", "", ran.error[2])
        )

    code = "print('said')\nif rank: raise ValueError(rank)\ndist.barrier()"
    live = notebook.cell(code)
    try:
        notebook.run("%env NBDIST_STATIC=1")
        static = notebook.cell(code)
    finally:
        notebook.run("%env NBDIST_STATIC=0")
    assert shown(static) == shown(live)
    assert static.text == live.text


def test_parameters_timeout_and_no_track_reach_the_ranks(notebook: Kernel) -> None:
    ran = notebook.cell("[lr, betas, name]", "-p lr=3e-4 -p betas=(0.9,0.99) -p name=\"'a b'\"")
    assert ran.text == "ranks 0-1 │ Out: [0.0003, (0.9, 0.99), 'a b']"
    slow = notebook.cell("import time\nwhile True: time.sleep(0.01)", "--timeout 0.5")
    assert slow.error is not None
    assert slow.error[0] == "ClusterError"
    assert "--timeout of 0.5 s" in slow.error[2]


def test_no_track_leaves_no_run(notebook: Kernel) -> None:
    before = runs(notebook.folder)
    code = "p = torch.nn.Parameter(torch.ones(2)); o = torch.optim.SGD([p], lr=0.1)\n"
    code += "for _ in range(3): o.zero_grad(); p.sum().backward(); o.step()"
    ran = notebook.cell(code, "--no-track")
    assert ran.error is None
    assert runs(notebook.folder) == before


def runs(folder: Path) -> list[str]:
    return sorted(p.name for p in (folder / ".nbdist" / "spool").glob("*"))


def test_push_and_pull_from_the_notebook(notebook: Kernel) -> None:
    ran = notebook.run("lr, words = 0.5, ['a']\n%dist push lr words -r 1")
    assert ran.error is None
    assert notebook.cell("[lr, words]", "-r 1").text == "rank 1 │ Out: [0.5, ['a']]"
    notebook.cell("mine = {'rank': rank}")
    assert notebook.run("%dist pull mine\nmine").text == "[{'rank': 0}, {'rank': 1}]"
    assert notebook.run("%dist pull mine -r 1\nmine").text == "[{'rank': 1}]"


def test_pulling_a_tensor_brings_torch_into_the_kernel_only_then(notebook: Kernel) -> None:
    here = "import sys; print('torch' in sys.modules)"
    notebook.cell("t = torch.ones(2).bfloat16() * rank")
    if notebook.run(here).text == "True":
        pytest.skip("another test has pulled a tensor into this kernel")
    ran = notebook.run("%dist pull t\nprint(t[1])", timeout_s=90)
    assert "tensor([1., 1.], dtype=torch.bfloat16)" in ran.text
    assert notebook.run(here).text == "True"


def test_a_training_ends_with_its_estimate_beside_what_was_measured(notebook: Kernel) -> None:
    make = "def make(): return torch.nn.Linear(64, 64)\n"
    batch = "torch.empty(4, 64, device='meta')"
    notebook.run(f"import nbdist, torch\n{make}_ = nbdist.estimate(make, {batch}, 'ddp', 2)")
    before = runs(notebook.folder)
    loop = "for _ in range(4): m(torch.ones(4, 64)).mean().backward(); o.step(); o.zero_grad()"
    ran = notebook.cell(
        f"{make}nbdist.parallelize(m := make(), 'ddp')\no = torch.optim.SGD(m.parameters())\n{loop}"
    )
    (run,) = set(runs(notebook.folder)) - set(before)
    said = "collectives 1 (estimated 1), bytes sent 17 kB (estimated 17 kB)."
    assert f"Beside nbdist.estimate, a step: {said}" in ran.text
    kept = notebook.folder / ".nbdist" / "spool" / run / "files" / "estimate.txt"
    assert "ddp on 2 ranks" in kept.read_text()
