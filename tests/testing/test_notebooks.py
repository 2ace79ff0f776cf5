"""`pytest --nbdist` catches what goes wrong in notebooks that train, and lets good ones pass."""

import shutil
from pathlib import Path

import pytest

from tests.lifecycle.kernels import wait_for
from tests.testing.pytest_run import Report, left_running, run_pytest
from tests.testing.regressions import CELLS, FEW, MISTAKES, write

REPEATS = 50
pytestmark = pytest.mark.timeout(900)  # the first of them runs three notebooks


def baseline(folder: Path) -> None:
    """Write the good notebook and its baseline."""
    write(folder / "good.ipynb")
    made = run_pytest(folder, "--nbdist", "--nbdist-ranks", "2", "--nbdist-baseline", "good.ipynb")
    assert made.exit_code == 0, made.text
    assert "Baselines were written: commit good.baseline.json" in made.text


def run(folder: Path, names: tuple[str, ...], *words: str) -> Report:
    """Run the notebooks with these mistakes, and the good one beside them."""
    baseline(folder)
    for name in names:
        write(folder / f"{name}.ipynb", MISTAKES[name])
        shutil.copy(folder / "good.baseline.json", folder / f"{name}.baseline.json")
    return run_pytest(folder, "--nbdist", "--nbdist-ranks", "2", *words, ".")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("few")


@pytest.fixture(scope="module")
def few(folder: Path) -> Report:
    return run(folder, FEW, "--nbdist-artifacts=kept")


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> Report:
    folder = tmp_path_factory.mktemp("twenty")
    return run(folder, tuple(MISTAKES), "--nbdist-cell-timeout=60", "-n", "2")


def caught(report: Report, name: str) -> None:
    """Check that a mistake was found in the cell where it shows, and told."""
    failure, mistake = report.failure(name), MISTAKES[name]
    assert failure.startswith(f"Cell {mistake.cell} of {len(CELLS)} "), failure
    assert mistake.says in failure
    assert CELLS[mistake.cell - 1].splitlines()[0] in failure


@pytest.mark.parametrize("name", FEW)
def test_a_mistake_fails_the_cell_where_it_shows(few: Report, name: str) -> None:
    caught(few, name)


def test_the_good_notebook_passes_beside_them_and_tells_what_it_found(few: Report) -> None:
    assert few.failure("good") == ""
    assert few.exit_code == 1
    assert f"{len(FEW)} failed, 1 passed" in few.text
    said = few.properties("good", "expect")
    assert len(said) == sum(cell.count("%dist expect") for cell in CELLS)
    assert any(line.startswith("loss < 0.5 holds: loss is 0.") for line in said)
    assert few.properties("good", "nbdist-ranks") == ["2"]


def test_the_board_and_the_notebook_are_kept_also_of_those_that_fail(
    few: Report, folder: Path
) -> None:
    for name in ("good", *FEW):
        kept = folder / "kept" / name
        assert (kept / f"{name}.ipynb").exists()
        assert (kept / "board-cell-3.png").read_bytes().startswith(b"\x89PNG")
        assert str(kept / "board-cell-3.png") in few.properties(name, "artifact")
    assert len(few.cases) == 1 + len(FEW)  # what is kept is no test


def test_nothing_is_left_running(few: Report, folder: Path) -> None:
    wait_for(lambda: not list(left_running(folder)), "kernels, ranks and senders to end")
    assert not list((folder / "temp").glob("nbdist-*"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", MISTAKES)
def test_each_of_twenty_mistakes_is_caught(every: Report, name: str) -> None:
    caught(every, name)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_beside_twenty_mistakes_the_good_notebook_passes(every: Report) -> None:
    assert every.failure("good") == ""
    assert f"{len(MISTAKES)} failed, 1 passed" in every.text


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_good_notebook_passes_fifty_times(tmp_path: Path) -> None:
    baseline(tmp_path)
    for number in range(REPEATS):
        write(tmp_path / f"again{number:02}.ipynb")
        shutil.copy(tmp_path / "good.baseline.json", tmp_path / f"again{number:02}.baseline.json")
    report = run_pytest(tmp_path, "--nbdist", "--nbdist-ranks", "2", ".", timeout_s=3000)
    assert f"{REPEATS + 1} passed" in report.text, report.text[-4000:]
