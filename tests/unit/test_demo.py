import io
import os
from pathlib import Path

import nbformat
import pytest

from nbdist import demo

PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mNkYAAAAAYAAjCB0C8AAAAASUVORK5CYII="
)


def write(path: Path, *sources: str) -> Path:
    notebook = nbformat.v4.new_notebook()
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    notebook.cells = [
        nbformat.v4.new_markdown_cell("# A tutorial\n\nText."),
        *(nbformat.v4.new_code_cell(source) for source in sources),
    ]
    nbformat.write(notebook, path)
    return path


def test_a_notebook_tells_its_cells_and_what_they_show_and_keeps_its_outputs(
    tmp_path: Path,
) -> None:
    show = (
        "# where the picture goes\n"
        "from IPython.display import display\n"
        f"display({{'image/png': '{PIXEL}', 'text/plain': 'The board.'}}, raw=True)"
    )
    path = write(tmp_path / "a.ipynb", "import os\nprint(os.getcwd())", show)
    out = io.StringIO()

    assert demo.execute(path, tmp_path, out)

    assert out.getvalue() == (
        "\nA tutorial\n"
        "[1/2]   import os\n"
        f"        {tmp_path}\n"
        "[2/2]   from IPython.display import display\n"
        "        The board.\n"
    )
    picture = demo.extract_picture(nbformat.read(path, as_version=4).cells, tmp_path / "b.png")
    assert picture is not None
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_cell_that_raises_ends_the_notebook_and_is_shown(tmp_path: Path) -> None:
    path = write(tmp_path / "a.ipynb", "1 / 0", "print('never')")
    out = io.StringIO()

    assert not demo.execute(path, tmp_path, out)

    assert "ZeroDivisionError: division by zero" in out.getvalue()
    assert "\x1b" not in out.getvalue()
    assert "[2/2]" not in out.getvalue()
    assert nbformat.read(path, as_version=4).cells[1].outputs[0].ename == "ZeroDivisionError"


def test_a_kernel_that_dies_ends_the_demo_with_a_sentence(tmp_path: Path) -> None:
    path = write(tmp_path / "a.ipynb", "import os\nos._exit(1)")
    out = io.StringIO()

    assert not demo.execute(path, tmp_path, out)

    assert "The kernel ended." in out.getvalue()


def test_ctrl_c_interrupts_the_cell_as_in_a_notebook_and_keeps_what_was_shown(
    tmp_path: Path,
) -> None:
    # The pid of the terminal's process travels into the cell, which presses Ctrl-C there.
    press = f"import os, signal, time\nprint('so far')\nos.kill({os.getpid()}, signal.SIGINT)"
    path = write(tmp_path / "a.ipynb", f"{press}\ntime.sleep(60)", "print('never')")
    out = io.StringIO()

    assert not demo.execute(path, tmp_path, out)

    shown, error = nbformat.read(path, as_version=4).cells[1].outputs
    assert shown.text == "so far\n"
    assert error.ename == "KeyboardInterrupt"
    assert "[2/2]" not in out.getvalue()


def test_the_first_line_that_says_something_names_a_cell() -> None:
    assert demo.first_line("# why\n\nx = 1\ny = 2") == "x = 1"
    assert demo.first_line("%%distributed -r 0\n\nx = 1\ny = 2") == "%%distributed -r 0   x = 1"
    assert demo.first_line("") == ""


def test_a_boards_picture_and_its_caption_are_told_once() -> None:
    caption = "Loss on 2 ranks over 80 steps."
    outputs = [
        nbformat.v4.new_output("display_data", data={"image/png": "=", "text/plain": caption}),
        nbformat.v4.new_output("display_data", data={"text/plain": caption}),
    ]

    assert demo.texts(outputs) == [caption]


def test_bare_reprs_of_figures_and_widgets_are_not_told() -> None:
    outputs = [
        nbformat.v4.new_output("display_data", data={"text/plain": "<Figure size 640x480>"}),
        nbformat.v4.new_output("display_data", data={"text/plain": "VBox(children=())"}),
        nbformat.v4.new_output("execute_result", data={"text/plain": "42"}),
    ]

    assert demo.texts(outputs) == ["42"]


def test_the_command_to_type_works_from_where_the_user_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = tmp_path / ".venv" / "bin"
    scripts.mkdir(parents=True)
    (scripts / "nbdist").write_text("#!/bin/sh\n")
    (scripts / "nbdist").chmod(0o755)
    monkeypatch.setattr("sys.executable", str(scripts / "python"))
    monkeypatch.chdir(tmp_path)

    monkeypatch.setenv("PATH", "/nowhere")
    assert demo.command("ui") == ".venv/bin/nbdist ui"
    monkeypatch.setenv("PATH", str(scripts))
    assert demo.command("ui") == "nbdist ui"
