"""Tab, Shift+Tab and NameErrors know the names of the ranks, asked as front ends ask."""

import pytest

import nbdist
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


def test_the_public_names_of_nbdist_complete_in_cells_of_the_ranks(notebook: Kernel) -> None:
    assert sorted(notebook.complete("%%distributed\nnbdist.")) == sorted(
        name for name in nbdist.__all__ if name[0] != "_"
    )


def test_words_of_layouts_and_values_of_options_complete(notebook: Kernel) -> None:
    begun = '%%distributed\nnbdist.parallelize(model, "'
    names = ["ddp", "hsdp", "zero1", "zero2", "zero3"]
    axes = ["cp=", "dp=", "ep=", "fsdp=", "pp=", "tp="]
    assert sorted(notebook.complete(begun)) == sorted([*names, *axes])
    assert notebook.complete(f"{begun}dp=1 t") == ["tp="]
    assert notebook.complete("%dist start --device ") == ["cpu", "cuda"]
    (notebook.folder / "train").mkdir()
    (notebook.folder / "train.py").touch()
    assert notebook.complete("%dist export tra") == ["train.py", "train/"]


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


@pytest.mark.parametrize(
    ("made", "name", "said", "then"),
    [
        ("hidden = 64", "hidden", "hidden is a variable of the notebook: ", "%dist push hidden"),
        (
            "def scale(x): return 2 * x",
            "scale",
            "scale is a function of the notebook: ",
            "%dist push scale",
        ),
        ("class Net: pass", "Net", "Net is a class of the notebook: ", "%dist push Net"),
        (
            "import fractions as fr",
            "fr",
            "fr is imported in the notebook, not on the ranks: ",
            "import fractions as fr",
        ),
    ],
)
def test_a_name_error_of_the_ranks_says_how_they_get_what_the_notebook_has(
    notebook: Kernel, made: str, name: str, said: str, then: str
) -> None:
    notebook.run(made)
    error = notebook.cell(f"x = 1\n{name}").error
    assert error is not None
    assert f"Do:  {said}{then}" in error[1]
    mended = notebook.run(then) if then[0] == "%" else notebook.cell(then)
    assert mended.error is None
    assert notebook.cell(name).error is None  # following it works


def test_a_name_that_nobody_has_is_to_be_fixed_as_ever(notebook: Kernel) -> None:
    notebook.run("class Sly:\n    def __getattr__(self, name): raise OSError\nsly = Sly()")
    for name in ("modle", "get_ipythn", "sly"):  # asking what the last one is raises
        error = notebook.cell(name).error
        assert error is not None
        assert "Do:  fix the cell and run it again; all ranks kept their variables." in error[1]


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
