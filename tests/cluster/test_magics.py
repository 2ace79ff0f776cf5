"""`%load_ext nbdist` and `%dist` as a person types them, in a real kernel."""

import re

import psutil
import pytest

from nbdist.client.faults.failures import plain
from tests.cluster.conftest import Kernel
from tests.lifecycle.kernels import wait_for

HEAVY = (
    "sorted({'torch', 'mlflow', 'matplotlib', 'ipyparallel', 'psutil'}"
    " & set(__import__('sys').modules))"
)


def test_loading_the_extension_brings_in_nothing_heavy_and_says_at_most_a_line(
    kernel: Kernel,
) -> None:
    before = kernel.run(f"print({HEAVY})").text
    loaded = kernel.run("%load_ext nbdist")
    assert loaded.error is None
    assert loaded.text.count("\n") <= 1
    assert kernel.run(f"print({HEAVY})").text == before


def test_without_a_cluster_status_says_so_and_how_to_start(kernel: Kernel) -> None:
    kernel.run("%load_ext nbdist\n%dist stop")
    bare = kernel.run("%dist")
    assert bare.error is None
    assert "No ranks are running" in bare.text
    assert bare.text == kernel.run("%dist status").text


def test_a_cell_before_the_start_is_one_error_that_says_what_to_type(kernel: Kernel) -> None:
    kernel.run("%load_ext nbdist\n%dist stop")
    ran = kernel.cell("rank")
    assert ran.error is not None
    name, _, shown = ran.error
    assert name == "ClusterError"
    assert "No ranks are running" in shown
    assert "%dist start" in shown
    assert "nbdist/" not in shown  # none of our frames
    assert len(shown.splitlines()) <= 3


def test_start_status_and_stop_tell_one_story(notebook: Kernel) -> None:
    table = notebook.run("%dist").text
    assert "rank  host" in table
    assert [line.split()[0] for line in table.splitlines()[-2:]] == ["0", "1"]
    assert "idle" in table
    again = notebook.run("%dist start")
    assert again.error is not None
    assert "A cluster is already running" in again.error[2]
    assert notebook.cell("rank").error is None


def test_python_in_a_cell_names_the_cell_as_the_notebook_numbers_it(notebook: Kernel) -> None:
    number = int(notebook.run("print(get_ipython().displayhook.prompt_count)").text)
    failed = notebook.run("import nbdist; nbdist.current().run('1 / 0')")
    assert failed.error is not None
    assert f"cell {number + 1}, line 1" in failed.error[2]


A_GPU = """
from types import SimpleNamespace
from nbdist.engine.rank import control
from nbdist.engine.training.devices import Gpu

told = {"allocated_bytes.all.current": 2e9, "allocated_bytes.all.peak": 3e9}
cuda = SimpleNamespace(
    is_initialized=lambda: True,
    memory_stats=lambda device: told | {"reserved_bytes.all.current": 4e9},
    get_device_properties=lambda device: SimpleNamespace(total_memory=80e9),
)
if rank == 1:
    control.gpu = Gpu(torch.device("cuda", 0), cuda)
"""


def test_status_has_the_memory_of_a_gpu_beside_that_of_the_process(notebook: Kernel) -> None:
    """Proven with a stand-in for `torch.cuda`; `%dist` of ranks without shows none of it."""
    without = notebook.run("%dist").text
    assert notebook.cell(A_GPU).error is None
    try:
        head, cpu, gpu = notebook.run("%dist").text.splitlines()[-3:]
    finally:
        notebook.cell("control.gpu = None")
    assert "GPU" not in without
    at = head.index("GPU allocated")
    assert head[at:].split() == ["GPU", "allocated", "reserved", "peak", "of"]
    assert cpu[at:].strip() == ""
    assert gpu[at:].split() == ["2.0", "GB", "4.0", "GB", "3.0", "GB", "80", "GB"]


SHORT_STEPS = """
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
losses = []
for _ in range(1500):
    loss = model(torch.randn(8, 4)).square().mean()
    for parameter in model.parameters():
        parameter.grad = None
    loss.backward()
    dist.all_reduce(model.weight.grad)
    optimizer.step()
    losses.append(loss.item())
"""


@pytest.mark.slow
def test_what_watching_costs_is_told_part_by_part_and_short_steps_are_sampled(
    notebook: Kernel,
) -> None:
    assert notebook.cell(SHORT_STEPS).error is None
    assert notebook.cell("print(1)").error is None  # trains nothing, and takes nothing away
    table = notebook.run("%dist status --cost").text
    assert table.startswith("Watching costs each rank ")
    assert "of the steps are measured part by part" in table
    for part in ("tap", "hooks", "boundary", "random", "checks", "records", "board", "messages"):
        assert f"\n{part} " in table
    # What calls cost is asked of torch a few times, and no more.
    priced = notebook.cell(
        "from nbdist.engine.kernel.cost_clock import clock\n"
        "[(price.ns > 0, price.is_wanted) for price in (clock.hook, clock.launch)]"
    )
    assert priced.text.count("[(True, False), (True, False)]") >= 1
    share = notebook.run("import nbdist; print(nbdist.current().cost.measured_share < 0.5)")
    assert share.text == "True"
    exact = notebook.run(
        "%dist pull losses\n"
        "panels = nbdist.current()._showing._last_board.scene.panels\n"
        "(curves,) = (panel.lines for panel in panels if panel.key == 'loss')\n"
        "print([curve.y.tolist() == losses[curve.rank] for curve in curves])"
    )
    assert exact.text == "[True, True]"


def test_the_kernel_never_imports_torch_for_cells_and_arrays(notebook: Kernel) -> None:
    notebook.cell("import numpy; here = numpy.arange(3) + rank; torch.ones(2)")
    pulled = notebook.run("%dist pull here\nprint(here)")
    assert "[array([0, 1, 2]), array([1, 2, 3])]" in pulled.text
    assert notebook.run("import sys; print('torch' in sys.modules)").text == "False"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("%dist strat", "did you mean start?"),
        ("%dist frobnicate", "it is one of start, attach, status"),
        ("%dist start -n two", "%dist start: -n takes a whole number, not 'two'"),
        ("%dist start --device tpu", 'device is "cpu" or "cuda"'),
        ("%dist start -n 0", "at least 1"),
        ("%dist push", "missing: NAME"),
        ("%dist push nowhere", "There is no 'nowhere'"),
        ("%dist pull nowhere", 'Rank 0 has no variable "nowhere"'),
        ("%dist pull x -r 7", "There is no rank 7"),
        ("%dist restart -r two", "RANKS is all"),
        ("%%distributed -r 5\nrank", "There is no rank 5"),
        ("%%distributed -r 1-0\nrank", "runs backwards"),
        ("%%distributed --frob\nrank", "--frob"),
        ("%%distributed -p lr\nrank", "KEY=VALUE"),
        ("%%distributed -p lr=abc\nrank", "Python literal"),
        ("%%distributed --timeout soon\nrank", "seconds above 0"),
        ("%%distributed --timeout -1\nrank", "seconds above 0"),
    ],
)
def test_a_wrong_word_is_refused_in_one_line(notebook: Kernel, line: str, expected: str) -> None:
    if line.startswith("%dist start"):
        notebook.run("%dist stop")
    ran = notebook.run(line)
    assert ran.error is not None
    assert expected in ran.error[2]
    assert len(ran.error[2].splitlines()) == 1
    assert ran.text == ""


@pytest.mark.parametrize("command", ["", "start", "status", "stop", "restart", "push", "pull"])
def test_every_command_has_help(kernel: Kernel, command: str) -> None:
    kernel.run("%load_ext nbdist")
    ran = kernel.run(f"%dist {command} --help")
    assert ran.error is None
    assert f"usage: %dist {command}".rstrip() in ran.text


def test_a_cell_has_help_and_does_not_run_then(notebook: Kernel) -> None:
    ran = notebook.cell("print('ran')", "--help")
    assert "usage: %%distributed" in ran.text
    assert "--timeout" in ran.text
    assert "│" not in ran.text


def test_help_is_a_command_too(kernel: Kernel) -> None:
    kernel.run("%load_ext nbdist")
    assert kernel.run("%dist help").text == kernel.run("%dist --help").text != ""
    assert kernel.run("%dist help start").text == kernel.run("%dist start --help").text


@pytest.mark.parametrize("cell", ["%%distributed --help", "%%distributed -h\n"])
def test_a_cell_that_only_asks_for_help_needs_no_body(kernel: Kernel, cell: str) -> None:
    kernel.run("%load_ext nbdist")
    assert "usage: %%distributed" in kernel.run(cell).text


@pytest.mark.parametrize("above", ["# my cell", "x = 1", "\n# two\n\n"])
def test_a_magic_below_other_lines_is_told_where_it_belongs(notebook: Kernel, above: str) -> None:
    error = notebook.run(f"{above}\n%%distributed -r 0\nrank").error
    assert error is not None
    assert error[1].startswith("%%distributed must be the first line of its cell.\n")
    assert "nbdist/" not in error[2]  # none of our frames
    assert notebook.run("text = '''\n%%distributed\n'''").error is None
    assert notebook.run("\n\n%%distributed\nrank").error is None


def test_a_question_mark_shows_what_the_ranks_have(notebook: Kernel) -> None:
    notebook.cell('def scale(x):\n    """Twice as much."""\n    return 2 * x')
    shown = plain(notebook.cell("scale?").text)
    assert "scale(x)" in shown
    assert "Twice as much." in shown
    assert shown.startswith("ranks 0-1")
    assert shown.count("Twice") == 1  # both say the same
    assert "return 2 * x" in plain(notebook.cell("scale??").text)
    assert "not found" in plain(notebook.cell("nothing_at_all?").text)


def test_runs_are_found_where_the_ranks_were_started_also_after_cd(notebook: Kernel) -> None:
    notebook.cell("nbdist.log(here=1)", "--run stays")
    try:
        ran = notebook.run("import os; os.mkdir('elsewhere')\n%cd -q elsewhere\n%dist runs --plain")
        assert "stays" in ran.text
        assert notebook.run("os.listdir()").text == "[]"
    finally:
        notebook.run("%cd -q ..\nos.rmdir('elsewhere')")


def test_new_ranks_work_in_the_folder_that_the_notebook_is_in_now(notebook: Kernel) -> None:
    notebook.run("%dist stop\nimport os; os.mkdir('other')\n%cd -q other")
    try:
        assert "Started 2 ranks" in notebook.run("%dist start -n 2 --device cpu").text
        assert "/other" in notebook.cell("import os; print(os.getcwd())").text
    finally:
        notebook.run("%dist stop\n%cd -q ..")


def test_an_interrupted_start_is_one_line(notebook: Kernel) -> None:
    notebook.run("%dist stop")
    kernel = psutil.Process(notebook.pid)
    before = len(kernel.children(recursive=True))

    def interrupt_when_it_has_begun() -> None:
        wait_for(lambda: len(kernel.children(recursive=True)) > before, "a new process")
        notebook.interrupt()

    ran = notebook.run(
        "print('in', flush=True)\n%dist start -n 2 --device cpu",
        interrupt_after=["in"],
        then=interrupt_when_it_has_begun,
    )
    assert ran.error is not None
    assert ran.error[2] == "KeyboardInterrupt: %dist start was stopped."
    assert notebook.run("%dist start -n 2 --device cpu").error is None


def test_commands_and_options_complete(kernel: Kernel) -> None:
    kernel.run("%load_ext nbdist")
    assert sorted(kernel.complete("%dist sta")) == ["stacks", "start", "status"]
    assert "--device" in kernel.complete("%dist start --de")
    assert "--ranks" in kernel.complete("%dist pull --r")
    assert "--no-track" in kernel.complete("%%distributed --no")
    assert sorted(kernel.complete("x = 1\n%dist pu")) == ["pull", "push"]


def test_restart_of_all_gives_new_processes_and_a_working_group(notebook: Kernel) -> None:
    notebook.cell("import os; gone = 1; print(f'pid {os.getpid()}')")
    said = notebook.run("%dist restart")
    assert "New processes for ranks 0-1, without variables." in said.text
    ran = notebook.cell("t = torch.ones(1); dist.all_reduce(t); print(int(t), 'gone' in globals())")
    assert "ranks 0-1 │ 2 False" in ran.text


def test_stop_twice_is_no_error_and_start_works_again(notebook: Kernel) -> None:
    assert notebook.run("%dist stop").error is None
    assert notebook.run("%dist stop").error is None
    assert "Started 2 ranks" in notebook.run("%dist start -n 2 --device cpu").text
    assert notebook.cell("rank").error is None


def test_a_failing_cell_is_named_by_the_notebooks_prompt_and_line(notebook: Kernel) -> None:
    ran = notebook.cell("x = 1\n\n1/0")

    inputs = [m for _, m in ran.messages if m["msg_type"] == "execute_input"]
    prompt = inputs[0]["content"]["execution_count"]
    assert ran.error is not None
    assert f"cell {prompt}, line 4  ZeroDivisionError" in ran.error[1]


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("%%time\nx = 1\n\n1 / 0", 5),
        ("\n%%timeit -n 1 -r 1\nx = 1\n1 / 0", 5),
        ("%%time\ndef fail():\n    1 / 0\nfail()", 4),
        ("x = 1\n%time 1 / 0", 3),
    ],
)
def test_what_a_magic_runs_fails_at_its_line_of_the_cell(
    notebook: Kernel, code: str, line: int
) -> None:
    ran = notebook.cell(code, "--no-track")
    assert ran.error is not None
    assert re.search(rf"ranks 0-1  cell \d+, line {line}  ZeroDivisionError", ran.error[1])


def test_a_run_bears_the_notebooks_prompt_and_a_loss_that_is_nan_is_said(notebook: Kernel) -> None:
    notebook.run("'a cell of the notebook alone'")
    ran = notebook.cell(
        "model = torch.nn.Linear(2, 1); opt = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for step in range(1, 6):\n"
        "    x = torch.full((4, 2), float('nan') if rank == 1 and step > 2 else 1.0)\n"
        "    model(x).mean().backward(); opt.step(); opt.zero_grad()"
    )
    assert ran.error is None, ran.error
    prompt = next(
        m["content"]["execution_count"] for _, m in ran.messages if m["msg_type"] == "execute_input"
    )

    told = notebook.run(
        "from pathlib import Path; from nbdist.client.tracking.past.runs import runs\n"
        "print(runs(Path('.nbdist'))[0].cell, nbdist.current().alarms)"
    )

    assert told.error is None, told.error
    assert told.text.startswith(f"{prompt} (")
    assert ran.text.count("The loss is NaN on rank 1 since step 3.") == 1
    assert "The loss is NaN on rank 1 since step 3." in told.text


@pytest.mark.parametrize(
    ("option", "now", "before"), [("grad_norm", True, False), ("quiet", 5.0, 10.0)]
)
def test_an_option_that_is_changed_under_a_running_cluster_is_said_to_count_later(
    notebook: Kernel, option: str, now: object, before: object
) -> None:
    changed = notebook.run(f"%config NBDist.{option} = {now!r}")
    again = notebook.run(f"%config NBDist.{option} = {now!r}")
    notebook.run(f"%config NBDist.{option} = {before!r}")

    assert changed.text == f"NBDist.{option} = {now!r} takes effect at the next %dist start."
    assert again.text == ""
