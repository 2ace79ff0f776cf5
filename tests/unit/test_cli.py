import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nbdist import cli
from nbdist.shared.errors import NBDistError

ROOT = Path(cli.__file__).parents[1]


def test_help_imports_neither_torch_nor_mlflow_nor_matplotlib() -> None:
    code = (
        "import contextlib, json, sys\n"
        "from nbdist.cli import main\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(sys.stderr):\n"
        "    main(['--help'])\n"
        "print(json.dumps(sorted(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    assert "demo" in done.stderr
    heavy = {"torch", "mlflow", "matplotlib", "ipyparallel", "nbclient", "psutil"}
    assert not heavy & set(json.loads(done.stdout))


def test_no_command_shows_the_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "doctor" in capsys.readouterr().out


def test_a_word_that_no_command_knows_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["doctor", "--quick"])
    assert "--quick" in capsys.readouterr().err


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What `nbdist lab` would have become."""
    commands: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _, command: commands.append(command))
    return commands


def test_lab_opens_the_folder_one_stands_in_and_writes_nothing_to_it(
    called: list[list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)

    cli.main(["lab", "--no-browser", "--port=0"])

    (command,) = called
    assert command[1:3] == ["-m", "jupyterlab"]
    assert command[3:] == [f"--ServerApp.root_dir={tmp_path}", "--no-browser", "--port=0"]
    assert list(tmp_path.iterdir()) == []
    assert "nbdist lab --tutorials" in capsys.readouterr().out


def test_lab_puts_a_copy_of_the_tutorials_beside_when_asked(
    called: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    cli.main(["lab", "--tutorials"])

    (command,) = called
    assert command[3:] == [
        f"--ServerApp.root_dir={tmp_path}",
        "--LabApp.default_url=/lab/tree/nbdist-tutorials",
    ]
    assert (tmp_path / "nbdist-tutorials/01_first_steps.ipynb").is_file()


def test_lab_in_a_clone_opens_its_own_notebooks(
    called: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)

    cli.main(["lab", "--tutorials"])

    assert called[0][3:] == [
        f"--ServerApp.root_dir={ROOT}",
        "--LabApp.default_url=/lab/tree/notebooks",
    ]
    assert not (ROOT / "nbdist-tutorials").exists()


def test_tutorials_that_cannot_be_copied_are_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NBDistError, match=r"cannot be copied into [^$]*\nWhy: "):
        cli.copy_notebooks(tmp_path, tmp_path / "file" / "nbdist-tutorials")


def test_ui_without_runs_says_where_it_looked_and_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["ui", str(tmp_path / ".nbdist")]) == 1

    said = capsys.readouterr().err
    assert f"There are no runs in {tmp_path}/.nbdist." in said
    assert "\nDo:  nbdist ui PATH/.nbdist" in said


def test_what_the_tutorials_lack_is_named_with_the_command_that_brings_it() -> None:
    with pytest.raises(
        NBDistError, match=r"need no_such_package[^$]*pip install '\.\[notebooks\]' in a clone"
    ):
        cli.need("json", "no_such_package")


def test_copied_notebooks_never_replace_what_somebody_wrote(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    for name in ("01.ipynb", "02.ipynb"):
        (source / name).write_text("new")
    target.mkdir()
    (target / "01.ipynb").write_text("mine")

    cli.copy_notebooks(source, target)

    assert (target / "01.ipynb").read_text() == "mine"
    assert (target / "02.ipynb").read_text() == "new"


def test_stop_ends_a_process_that_ignores_being_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_STOP_TIMEOUT_S", 0.1)
    code = (
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=1); input()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    with process:
        assert process.stdout is not None
        process.stdout.readline()

        cli.stop_group(process)

        assert process.returncode == -9


def test_the_help_of_export_shows_its_options_wherever_they_stand(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["export", "--help"])
    shown = capsys.readouterr().out
    assert all(option in shown for option in ("NOTEBOOK", "--cells", "--format", "--force"))
    assert cli.main(["export", "--force", "train.txt", "train.py"]) == 1
    assert "train.txt is none" in capsys.readouterr().err
