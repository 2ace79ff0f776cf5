"""Tab, Shift+Tab and NameErrors know the names of the ranks, asked as front ends ask."""

import pytest

from tests.cluster.conftest import Kernel


@pytest.fixture
def model(notebook: Kernel) -> Kernel:
    """The notebook, with a model on the ranks."""
    assert notebook.cell("model = torch.nn.Sequential(torch.nn.Linear(2, 2))").error is None
    return notebook


def test_names_of_the_ranks_complete_in_their_cells_alone(model: Kernel) -> None:
    assert "model" in model.complete("%%distributed\nmod")
    assert "parameters" in model.complete("%%distributed\nx = 1\nmodel.par")
    assert {"Adam", "AdamW"} <= set(model.complete("%%distributed\ntorch.optim.Ada"))
    assert "model" not in model.complete("mod")
    assert "model" in model.complete("%dist pull mod")
    assert sorted(model.complete("%dist stacks -r ")) == ["0", "1", "all"]


def test_calls_and_magics_are_described(model: Kernel) -> None:
    said = model.inspect("%%distributed\ntorch.optim.AdamW(")
    assert "torch.optim.AdamW(params" in said
    assert "weight_decay" in said
    assert "Sequential, on rank 0" in model.inspect("%%distributed --run 'x'\nmodel")
    assert "usage: %dist start" in model.inspect("%dist start")
    assert "usage: %%distributed" in model.inspect("%%distributed --run")
    assert "Return the number of items" in model.inspect("len(")  # as ever, in a plain cell


def test_a_name_error_says_that_the_ranks_have_the_name(model: Kernel) -> None:
    error = model.run("model").error
    assert error is not None
    assert error[:2] == ("NameError", "name 'model' is not defined")
    assert "`model` is a name of the ranks: use it in a %%distributed cell" in error[2]
    for other in ("modle", "1/0", "int('x')"):
        error = model.run(other).error
        assert error is not None
        assert "of the ranks" not in error[2]


def test_names_complete_in_a_subshell_while_a_cell_runs(model: Kernel) -> None:
    found: list[str] = []

    def complete() -> None:
        found.extend(model.complete_in_subshell("%%distributed\nmodel.par"))
        (model.folder / "completed").touch()

    model.cell(
        "import pathlib, time\nprint('begun', flush=True)\n"
        "while not pathlib.Path('completed').exists(): time.sleep(0.05)",
        interrupt_after=["begun"],
        then=complete,
    )
    assert "parameters" in found
