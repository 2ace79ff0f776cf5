"""What the report of a notebook's test says, from cells as nbclient leaves them."""

import base64
from pathlib import Path
from typing import Any

from nbformat.v4 import new_code_cell, new_markdown_cell, new_output

from nbdist.testing.notebook_item import _place_of
from nbdist.testing.outcome import expectations, failure, first_line, pictures, shown_error

PNG = base64.b64encode(b"picture").decode()


def picture(text: str) -> Any:
    return new_output("display_data", {"image/png": PNG, "text/plain": text})


def test_notebooks_of_one_name_have_artifacts_of_their_own_wherever_they_lie() -> None:
    root = Path("/home/ada/project")
    inside = _place_of(root / "nb" / "train.ipynb", root)
    elsewhere = {_place_of(Path(f"/data/{one}/train.ipynb"), root) for one in "ab"}
    assert inside == Path("nb/train")
    assert elsewhere == {Path("data/a/train"), Path("data/b/train")}


def test_a_failure_names_the_cell_by_its_number_among_those_that_run() -> None:
    cells = [
        new_markdown_cell("# Title"),
        new_code_cell("x = 1"),
        new_code_cell(""),
        new_code_cell("# why\n%dist expect loss < 1"),
    ]
    text = str(failure(cells, 3, "failed", "\x1b[31mExpectationError\x1b[0m: no"))
    assert text == "Cell 2 of 2 failed: %dist expect loss < 1\n\nExpectationError: no"


def test_below_a_cell_magic_two_lines_tell_what_a_cell_does() -> None:
    assert first_line("%%distributed --run a\n# so\n\nmodel = train(lr)") == (
        "%%distributed --run a   model = train(lr)"
    )
    assert first_line("# a comment alone") == "# a comment alone"


def test_boards_are_found_and_figures_of_the_cells_own_are_not() -> None:
    cells = [
        new_code_cell("plot()", outputs=[picture("<Figure size 9x9>")]),
        new_code_cell(
            "%%distributed\ntrain()",
            outputs=[picture("<Figure size 9x9>"), picture("Loss on 2 ranks."), picture("Time.")],
        ),
        new_code_cell(
            "%dist board", outputs=[new_output("display_data", {"image/svg+xml": "<svg/>"})]
        ),
    ]
    found = list(pictures(cells))
    assert [one.name for one in found] == [
        "board-cell-2.png",
        "board-cell-2-2.png",
        "board-cell-3.svg",
    ]
    assert [one.content for one in found] == [b"picture", b"picture", b"<svg/>"]


def test_expectations_are_the_lines_of_the_magic_and_no_others() -> None:
    said = "loss < 1 holds: loss is 0.2.\nsome text\nstep <= 1.1 x baseline is not judged: why.\n"
    cells = [
        new_code_cell("%dist expect loss < 1", outputs=[new_output("stream", text=said)]),
        new_code_cell("print()", outputs=[new_output("stream", text="x holds: y.")]),
    ]
    assert expectations(cells) == [
        "loss < 1 holds: loss is 0.2.",
        "step <= 1.1 x baseline is not judged: why.",
    ]


def test_the_error_shown_is_the_last_one_of_the_cell() -> None:
    raised = new_output("error", ename="E", evalue="v", traceback=["a", "b"])
    assert shown_error(new_code_cell("x", outputs=[raised])) == "a\nb"
    assert shown_error(new_code_cell("x")) == ""
