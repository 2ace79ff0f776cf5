"""The same cells under other front ends than a browser: what is shown, and what is left running."""

import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pexpect
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from tests.lifecycle.kernels import Notebook, private_environment, wait_for
from tests.testing.pytest_run import left_running

START = "%load_ext nbdist\n%dist start -n 2 --device cpu"
ADD = """%%distributed
total = torch.ones(1) * (rank + 1)
dist.all_reduce(total)
print("the sum is", int(total) * factor)"""
FAIL = "%%distributed -r 1\nraise ValueError('bad sample')"
COLOURS = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")

# Colab and VS Code run kernels and shells of their own classes, whose front ends tell no name of
# the notebook in the environment; Colab's shows tracebacks by a method of its own.
OWN_KERNEL = """
from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelapp import IPKernelApp
from ipykernel.zmqshell import ZMQInteractiveShell
from traitlets import Type

class Shell(ZMQInteractiveShell):
    def _showtraceback(self, etype, evalue, stb):
        super()._showtraceback(etype, evalue, stb)

class Kernel(IPythonKernel):
    shell_class = Type(Shell)

if __name__ == "__main__":
    IPKernelApp.launch_instance(kernel_class=Kernel)
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {**private_environment(tmp_path), "JUPYTER_PREFER_ENV_PATH": "1", "NBDIST_STATIC": "1"}


def write(path: Path, factor: str = "2") -> None:
    parameters = new_code_cell(f"factor = {factor}", metadata={"tags": ["parameters"]})
    cells = [parameters, new_code_cell(START), new_code_cell("%dist push factor")]
    spec = {"name": "python3", "language": "python", "display_name": "Python 3"}
    notebook = new_notebook(cells=[*cells, new_code_cell(ADD)], metadata={"kernelspec": spec})
    nbformat.write(notebook, path)


def shown(path: Path) -> str:
    """Return the text that the last cell of an executed notebook shows."""
    outputs = nbformat.read(path, as_version=4).cells[-1].outputs
    return "\n".join(output.data["text/plain"] for output in outputs if "data" in output)


def run(words: list[str], environment: dict[str, str], folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def assert_nothing_left(folder: Path) -> None:
    wait_for(lambda: not list(left_running(folder)), "kernel, ranks and senders to end", 60)


@pytest.mark.slow
def test_nbconvert_executes_a_notebook_with_ranks(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    write(tmp_path / "sums.ipynb")
    words = ["nbconvert", "--to", "notebook", "--execute", "--output", "done.ipynb", "sums.ipynb"]
    run(["jupyter", *words], environment, tmp_path)
    assert shown(tmp_path / "done.ipynb") == "ranks 0-1 │ the sum is 6"
    assert_nothing_left(tmp_path)


TRAIN = """%%distributed --no-track
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(20):
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()"""


@pytest.mark.slow
def test_a_board_that_nbconvert_asks_for_is_a_picture_in_the_file(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    cells = [new_code_cell(source) for source in (START, TRAIN, "%dist board")]
    spec = {"name": "python3", "language": "python", "display_name": "Python 3"}
    nbformat.write(new_notebook(cells=cells, metadata={"kernelspec": spec}), tmp_path / "in.ipynb")
    words = ["nbconvert", "--to", "notebook", "--execute", "--output", "done.ipynb", "in.ipynb"]
    run(["jupyter", *words], environment | {"NBDIST_STATIC": "0"}, tmp_path)
    *_, board = nbformat.read(tmp_path / "done.ipynb", as_version=4).cells
    forms = [set(output.data) for output in board.outputs]
    assert any("image/png" in form for form in forms)
    assert "<table" in "".join(output.data.get("text/html", "") for output in board.outputs)
    assert not any("widget-view" in name for form in forms for name in form)


@pytest.mark.slow  # which runs a notebook by nbclient, as nbconvert does
def test_papermill_runs_a_notebook_with_other_parameters(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    write(tmp_path / "sums.ipynb")
    words = ["sums.ipynb", "done.ipynb", "-p", "factor", "7", "--kernel", "python3"]
    run(["papermill", *words, "--no-progress-bar"], environment, tmp_path)
    assert shown(tmp_path / "done.ipynb") == "ranks 0-1 │ the sum is 21"
    assert_nothing_left(tmp_path)


def test_ipython_in_a_terminal_runs_cells_and_shows_their_errors(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    words = ["-m", "IPython", "--simple-prompt", "--no-banner", "--no-confirm-exit"]
    shell = pexpect.spawn(
        sys.executable,
        words,
        cwd=str(tmp_path),
        env={**environment, "TERM": "dumb"},
        encoding="utf-8",
        timeout=60,
        dimensions=(50, 200),
    )
    try:
        said = "".join(
            _type(shell, cell)
            for cell in (START, "factor = 3", "%dist push factor", ADD, FAIL, "%dist status")
        )
        shell.sendline("exit")
        shell.expect(pexpect.EOF)
    finally:
        shell.close(force=True)
    assert "Started 2 ranks on cpu, gloo." in said
    assert "ranks 0-1 │ the sum is 9" in said
    assert "RankError: rank 1 failed" in said
    assert "ValueError: bad sample" in said
    assert "nbdist/client" not in said  # none of our frames
    assert said.count("idle") == 2
    assert_nothing_left(tmp_path)


def _type(shell: "pexpect.spawn[str]", cell: str) -> str:
    """Type a cell, line by line, and an empty line where it has several; return what is shown."""
    shell.expect(r"In \[\d+\]: ")
    lines = cell.split("\n")
    for line in lines[:1] if cell.startswith("%load_ext") else lines:
        shell.sendline(line)
    if cell.startswith("%load_ext"):  # line magics are a cell each here
        return _type(shell, lines[1])
    if len(lines) > 1:
        shell.sendline("")
        shell.sendline("")  # a cell magic ends with two
    shell.expect(r"(?=\r?\nIn \[\d+\]: )")
    return COLOURS.sub("", shell.before or "")


@pytest.mark.slow
def test_a_kernel_with_classes_of_its_own_runs_cells_and_shows_their_errors(tmp_path: Path) -> None:
    module = tmp_path / "own_kernel.py"
    module.write_text(OWN_KERNEL)
    notebook = Notebook(tmp_path, COLAB_RELEASE_TAG="release", JPY_SESSION_NAME="")
    place = notebook.argv.index("-m")
    notebook.argv[place : place + 2] = [str(module)]
    with notebook:
        notebook.start()
        notebook.run("factor = 5\n%dist push factor")
        assert notebook.run(ADD) == "ranks 0-1 │ the sum is 15"
        failed = notebook.run(FAIL)
        assert "RankError: rank 1 failed" in failed
        assert "nbdist/client" not in failed
    assert_nothing_left(tmp_path)
