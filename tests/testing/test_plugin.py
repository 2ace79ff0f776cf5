"""The options of `pytest --nbdist`, its exit codes, and its place beside nbval."""

from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from nbdist.testing import runner
from nbdist.testing.outcome import NotebookFailed
from tests.testing.pytest_run import run_pytest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    cells = [new_code_cell("x = 1"), new_code_cell("assert x == 1")]
    nbformat.write(new_notebook(cells=cells), tmp_path / "plain.ipynb")
    (tmp_path / ".ipynb_checkpoints").mkdir()
    nbformat.write(new_notebook(), tmp_path / ".ipynb_checkpoints" / "plain-checkpoint.ipynb")
    return tmp_path


def test_without_the_option_no_notebook_is_collected(folder: Path) -> None:
    report = run_pytest(folder, ".")
    assert report.exit_code == 5
    assert "no tests ran" in report.text


@pytest.mark.slow
def test_beside_nbval_each_collects_its_own(folder: Path) -> None:
    both = run_pytest(folder, "--nbdist", "--nbval", "--collect-only", "-q", ".")
    assert both.text.count("plain.ipynb::notebook") == 1
    assert both.text.count("plain.ipynb::Cell") == 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--nbdist", "--nbdist-ranks", "0"), "takes a number of ranks, at least 1"),
        (("--nbdist-baseline",), "add --nbdist to run them"),
    ],
)
def test_wrong_words_are_a_usage_error(folder: Path, words: tuple[str, ...], says: str) -> None:
    report = run_pytest(folder, *words, ".")
    assert report.exit_code == 4
    assert says in report.text


def test_a_notebook_without_ranks_runs_and_old_outputs_are_no_evidence(folder: Path) -> None:
    report = run_pytest(folder, "--nbdist", "--nbdist-artifacts=kept", ".")
    assert report.exit_code == 0, report.text
    assert report.properties("plain", "cells") == ["2"]
    assert (folder / "kept" / "plain" / "plain.ipynb").exists()


@pytest.mark.slow
def test_what_ends_a_kernel_or_is_no_notebook_is_told_in_words(tmp_path: Path) -> None:
    cells = [new_code_cell("import os"), new_code_cell("os._exit(3)  # as a crash does")]
    nbformat.write(new_notebook(cells=cells), tmp_path / "crash.ipynb")
    (tmp_path / "broken.ipynb").write_text("{")
    allowed = new_code_cell("import time; time.sleep(600)", metadata={"tags": ["raises-exception"]})
    nbformat.write(new_notebook(cells=[allowed]), tmp_path / "slow.ipynb")
    report = run_pytest(tmp_path, "--nbdist", "--nbdist-cell-timeout", "3", ".")
    assert report.exit_code == 1
    assert report.failure("crash").startswith("Cell 2 of 2 failed: os._exit(3)")
    assert "Kernel died" in report.failure("crash")
    assert report.failure("broken").startswith("This is no notebook")
    assert report.failure("slow").startswith("Cell 1 of 1 took longer than 3 s")


def test_a_cell_that_hears_no_interrupt_is_told_by_the_time_that_was_asked_for_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runner, "_SETTLE_S", 1.0)
    deaf = "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\ntime.sleep(600)"
    notebook = new_notebook(cells=[new_code_cell(deaf)])
    with pytest.raises(NotebookFailed) as failed:
        runner.run_notebook(notebook, tmp_path / "deaf.ipynb", runner.RunOptions(None, 1.25))
    told = str(failed.value)
    assert told.startswith("Cell 1 of 1 took longer than 1.25 s: import signal, time")
    assert told.endswith("It did not end when it was interrupted, so its kernel was killed.")
    assert "Timeout" not in f"{told}{caplog.text}"  # nbclient's own, with another number


@pytest.mark.slow
def test_baselines_are_named_where_some_were_written_and_none_is_promised_elsewhere(
    folder: Path,
) -> None:
    words = ("--nbdist", "--nbdist-baseline")
    assert "No baseline was written: no %dist expect" in run_pytest(folder, *words, ".").text
    for name, source in (
        ("stores", "import pathlib; pathlib.Path('stores.baseline.json').write_text('{}')"),
        ("fails", "1 / 0"),
    ):
        nbformat.write(new_notebook(cells=[new_code_cell(source)]), folder / f"{name}.ipynb")
    stored = run_pytest(folder, *words, ".")
    assert "Baselines were written: commit stores.baseline.json\n" in stored.text
    assert stored.properties("stores", "baseline") == ["stores.baseline.json"]
    failed = run_pytest(folder, *words, "fails.ipynb")
    assert "1 failed" in failed.text
    assert "written" not in failed.text
