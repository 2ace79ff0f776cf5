"""Where an export is written, and what it says: files, and nothing else."""

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from nbdist import cli
from nbdist.client.export.cells import NotebookCell, read_notebook
from nbdist.client.export.export import FORMATS, Exported, ExportRequest, export
from nbdist.client.export.place import write_all
from nbdist.client.notebook.arguments import parse_dist, parse_distributed
from nbdist.shared.errors import UsageError
from nbdist.shared.options import ClusterOptions

NO_TIME = {"torchrun", "ray", "spark"}
CELLS = [
    NotebookCell(1, "%dist start -n 4 --device cpu --threads 1 --timeout 60"),
    NotebookCell(2, '%%distributed\nnbdist.parallelize(model, "ddp")'),
    NotebookCell(3, "%%distributed\nraise ValueError", trouble="failed"),
]


def exported(path: Path, made: list[NotebookCell] = CELLS, **more: object) -> Exported:
    request = ExportRequest(path, **more)  # type: ignore[arg-type]
    return export(request, made, parse_dist, parse_distributed)


def test_a_script_says_what_it_is_and_how_it_runs(tmp_path: Path) -> None:
    made = exported(tmp_path / "train.py")
    assert str(made) == (
        f"Wrote {tmp_path / 'train.py'}, of 1 cell.\n"
        "Left out: cell 3: failed.\n"
        "Nothing in the script gives model, which cell 2 uses.\n"
        f"Run it: PYTHONHASHSEED=0 torchrun --nproc-per-node 4 {tmp_path / 'train.py'}"
    )
    assert 'nbdist.init(device="cpu", threads=1, timeout=60)' in (tmp_path / "train.py").read_text()


@pytest.mark.parametrize(
    ("path", "shown", "in_header"),
    [
        ("sub/train.py", "sub/train.py", "train.py"),
        ("sub/my train.py", "'sub/my train.py'", "'my train.py'"),
        ('a"b.py', "'a\"b.py'", "'a\"b.py'"),
    ],
)
def test_the_command_that_is_printed_runs_the_script_from_where_the_user_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, shown: str, in_header: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    cells = [NotebookCell(1, "%%distributed -r 1\na = 1")]
    made = exported(Path(path), cells)
    assert str(made).endswith(f"\nRun it: PYTHONHASHSEED=0 torchrun --nproc-per-node 2 {shown}")
    assert (
        f"    PYTHONHASHSEED=0 torchrun --nproc-per-node 2 {in_header}\n" in Path(path).read_text()
    )


def test_a_partition_that_slurm_could_not_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'a b' is no partition of Slurm's"):
        exported(tmp_path / "train.py", format="sbatch", partition="a b")
    assert not list(tmp_path.iterdir())
    exported(tmp_path / "train.py", format="sbatch", partition="gpu,long")
    assert "#SBATCH --partition=gpu,long\n" in (tmp_path / "train.sbatch").read_text()


def test_lines_that_were_taken_out_are_told(tmp_path: Path) -> None:
    cell = NotebookCell(5, "%%distributed\n%%time\n!nvidia-smi\na = 1")
    assert "\nCell 5 is without %%time, !nvidia-smi.\n" in str(exported(tmp_path / "a.py", [cell]))


def test_a_running_cluster_tells_what_its_start_left_open(tmp_path: Path) -> None:
    cells = [NotebookCell(1, "%dist start"), NotebookCell(2, "%%distributed\na = 1")]
    running = ClusterOptions(n=3, device="cpu", backend="gloo", threads=1)
    request = ExportRequest(tmp_path / "train.py")
    made = export(request, cells, parse_dist, parse_distributed, running=running)
    assert made.script.options.n == 3
    assert made.script.options.threads is None


def test_ranks_on_several_machines_are_started_on_each(tmp_path: Path) -> None:
    start = "%dist start --launcher ssh --hosts a:2,b:2 -n 4 --trust-network"
    made = exported(tmp_path / "a.py", [NotebookCell(1, start), CELLS[1]])
    assert made.script.command == (
        "PYTHONHASHSEED=0 torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:29400 "
        "--nproc-per-node 2 a.py"
    )


def test_a_module_that_the_script_needs_is_never_overwritten(tmp_path: Path) -> None:
    (path := tmp_path / "helper.py").write_text("mine")
    cells = [NotebookCell(1, "%%distributed\nimport helper")]
    request = ExportRequest(path, force=True)
    with pytest.raises(UsageError, match="is a module that the script needs"):
        export(request, cells, parse_dist, parse_distributed, folder=tmp_path)
    assert path.read_text() == "mine"


def test_modules_in_the_notebooks_folder_are_found_and_travel_with_the_job(tmp_path: Path) -> None:
    folder = tmp_path / "notebooks"
    (folder / "shapes").mkdir(parents=True)
    for name, text in {
        "model.py": "import shapes.round\nimport json",
        "shapes/__init__.py": "",
        "shapes/round.py": "import nbdist",
        "unused.py": "",
        "broken.py": "def",
    }.items():
        (folder / name).write_text(text)
    cells = [NotebookCell(1, "%%distributed\nimport torch, broken\nfrom model import net")]
    request = ExportRequest(tmp_path / "train.py", "ray")
    exported = export(request, cells, parse_dist, parse_distributed, folder=folder)
    made = exported.script
    assert f"shapes/round.py; copy them from {folder}.\n" in str(exported)
    assert made.modules == ("broken.py", "model.py", "shapes/__init__.py", "shapes/round.py")
    assert "nbdist.init(" in made.text
    assert "'shapes/round.py'" in (tmp_path / "train_ray.py").read_text()


def test_what_is_there_is_overwritten_only_by_force(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("mine")
    with pytest.raises(UsageError, match="is there already; --force overwrites it"):
        exported(path)
    with pytest.raises(UsageError, match="there is no cell 99"):  # a wrong word comes first
        export(ExportRequest(path, cells="99"), CELLS, parse_dist, parse_distributed)
    assert path.read_text() == "mine"
    exported(path, force=True)
    assert "nbdist.init" in path.read_text()
    (tmp_path / "other.sbatch").write_text("mine")
    with pytest.raises(UsageError, match=r"other.sbatch is there already"):
        exported(tmp_path / "other.py", format="sbatch")
    assert not (tmp_path / "other.py").exists()


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("none/train.py", "There is no folder"),
        ("train", "writes a script, such as .*train.py, not"),
        ("train.ipynb", "writes a script, such as .*train.py, not"),
        ("torch.py", "would be imported in the place of Python's torch"),
        ("folder.py", "is a folder"),
    ],
)
def test_a_place_that_cannot_be_written_to_is_refused(tmp_path: Path, name: str, told: str) -> None:
    (tmp_path / "folder.py").mkdir()
    with pytest.raises(UsageError, match=told):
        exported(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "format"),
    [("ray.py", "ray"), ("pyspark.py", "spark"), ("pandas.py", "torchrun")],
)
def test_a_name_that_the_script_or_its_driver_imports_is_refused(
    tmp_path: Path, name: str, format: str
) -> None:
    cells = [NotebookCell(1, "%%distributed\nimport pandas.io")]
    with pytest.raises(UsageError, match=f"A script called {name} would be imported in the place"):
        exported(tmp_path / name, cells, format=format)
    assert list(tmp_path.iterdir()) == []
    exported(tmp_path / f"train_{name}", cells, format=format)


def test_a_folder_that_cannot_be_written_to_is_told_in_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Path.write_text

    def fill_up(path: Path, text: str, **more: str) -> int:
        if path.name.endswith(".sbatch.new"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, text, **more)

    (tmp_path / "train.py").write_text("mine")
    monkeypatch.setattr(Path, "write_text", fill_up)
    with pytest.raises(UsageError) as caught:
        exported(tmp_path / "train.py", format="sbatch", force=True)
    assert caught.value.what == f"{tmp_path / 'train.sbatch'} cannot be written; nothing was."
    assert caught.value.why == "No space left on device"
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]
    with pytest.raises(UsageError, match="cannot be written; nothing was"):
        exported(tmp_path / f"{'a' * 300}.py")


def test_a_file_that_does_not_get_its_name_is_told_with_those_that_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = Path.replace

    def keep_the_job(path: Path, target: Path) -> Path:
        if target.suffix == ".sbatch":  # another user's, in a folder that all may write to
            raise PermissionError(errno.EPERM, "Operation not permitted")
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", keep_the_job)
    with pytest.raises(UsageError) as caught:
        exported(tmp_path / "train.py", format="sbatch", force=True)
    assert caught.value.what == (
        f"{tmp_path / 'train.sbatch'} cannot be written; before it, these were: train.py."
    )
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_a_folder_with_the_name_of_a_file_is_refused_before_any_is_written(tmp_path: Path) -> None:
    (tmp_path / "b.py").mkdir()
    with pytest.raises(UsageError, match="is a folder"):
        write_all(tmp_path, {"a.py": "new", "b.py": "new"}, force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["b.py"]


@pytest.mark.parametrize(
    ("words", "told", "do"),
    [
        (
            {"nodes": 3},
            "--nodes 3: 4 ranks cannot be spread over 3 machines evenly.",
            "--nodes takes 1, 2, 4 here",
        ),
        ({"nodes": 0}, "--nodes 0: ranks need one machine or more.", ""),
        ({"nodes": -1}, "--nodes -1: ranks need one machine or more.", ""),
        (
            {"partition": "gpus"},
            "--partition means nothing for the script alone; nothing was written.",
            "leave it out, or use --format sbatch",
        ),
        (
            {"sbatch": ("--mem=4G",), "format": "ray"},
            "--sbatch means nothing for ray; nothing was written.",
            "leave it out, or use --format sbatch",
        ),
    ],
)
def test_words_that_would_change_nothing_are_refused(
    tmp_path: Path, words: dict[str, Any], told: str, do: str
) -> None:
    with pytest.raises(UsageError) as caught:
        exported(tmp_path / "train.py", **words)
    assert (caught.value.what, caught.value.do) == (told, do)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("format", sorted({*FORMATS} - NO_TIME))
def test_a_time_limit_is_in_what_is_written(tmp_path: Path, format: str) -> None:
    made = exported(tmp_path / "train.py", format=format, time_limit="1-02:03:04")
    text = "".join(path.read_text() for path in made.files[1:])
    assert "1-02:03:04" in text or "93784" in text


@pytest.mark.parametrize("format", sorted(NO_TIME))
def test_a_time_limit_is_refused_where_nothing_knows_it(tmp_path: Path, format: str) -> None:
    with pytest.raises(UsageError, match="--time means nothing for"):
        exported(tmp_path / "train.py", format=format, time_limit="30")


def test_nodes_are_known_by_the_script_alone(tmp_path: Path) -> None:
    made = exported(tmp_path / "train.py", nodes=2)
    assert "--nnodes 2" in made.script.command
    assert made.script.command.endswith("--nproc-per-node 2 train.py")


def test_without_a_cell_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        exported(tmp_path / "train.py", [])
    assert caught.value.why == "there is no %%distributed cell that has run"
    with pytest.raises(UsageError) as caught:
        exported(tmp_path / "train.py", CELLS[2:])
    assert caught.value.why == "cell 3 failed"
    assert list(tmp_path.iterdir()) == []


def test_a_job_lies_beside_the_script(tmp_path: Path) -> None:
    made = exported(tmp_path / "train.py", format="sbatch", nodes=2, time_limit="1:00:00")
    assert [path.name for path in made.files] == ["train.py", "train.sbatch"]
    text = (tmp_path / "train.sbatch").read_text()
    assert "#SBATCH --nodes=2" in text
    assert "#SBATCH --time=1:00:00" in text
    assert "pip install" not in text
    template = tmp_path / "site.sh"
    template.write_text("#SBATCH --account=lab\nmodule load cuda\n")
    start = (
        f"%dist start --launcher slurm --nodes 2 --gpus-per-node 4 --time 30 --sbatch={template}"
    )
    exported(tmp_path / "b.py", [NotebookCell(1, start), CELLS[1]], format="sbatch")
    text = (tmp_path / "b.sbatch").read_text()
    assert "#SBATCH --account=lab" in text
    assert "#SBATCH --time=30" in text
    assert "\nmodule load cuda\n" in text
    assert "--nproc-per-node=4" in text
    with pytest.raises(UsageError, match="--format is torchrun, sbatch, "):
        exported(tmp_path / "b.py", format="carrier-pigeon")


def notebook(folder: Path) -> Path:
    def cell(source: str, *outputs: str) -> dict[str, object]:
        told = [{"output_type": kind} for kind in outputs]
        return {"cell_type": "code", "source": source.splitlines(True), "outputs": told}

    cells = [
        {"cell_type": "markdown", "source": ["%%distributed"]},
        cell("%dist start -n 3"),
        cell("%%distributed\na = rank", "stream"),
        cell("%%distributed\n1 / 0", "stream", "error"),
        cell("%%distributed\na + 1"),
    ]
    path = folder / "digits.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    return path


def test_a_file_is_exported_without_a_kernel(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["export", str(notebook(tmp_path)), "train.py"]) == 0
    assert (
        "Left out: cell 3: failed.\nRun it: PYTHONHASHSEED=0 torchrun --nproc-per-node 3 train.py"
        in (capsys.readouterr().out)
    )
    assert "The cells of digits.ipynb, as a script." in Path("train.py").read_text()
    assert cli.main(["export", "digits.ipynb", "train.py"]) == 1
    assert "UsageError: train.py is there already" in capsys.readouterr().err
    assert cli.main(["export", "digits.ipynb", "b.py", "--cells", "2", "--format", "sbatch"]) == 0
    assert "# Cell 4" not in Path("b.py").read_text()
    assert Path("b.sbatch").exists()


def test_a_file_that_is_no_notebook_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.ipynb").write_text("{}")
    with pytest.raises(UsageError, match="is no notebook"):
        read_notebook(tmp_path / "a.ipynb", parse_dist)
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_notebook(tmp_path / "b.ipynb", parse_dist)


TRAIN = "%%distributed\na = 1"


def test_ranks_that_a_scale_added_before_the_training_are_those_of_the_script(
    tmp_path: Path,
) -> None:
    sources = ("%dist start -n 1", "%dist scale 2", "%%distributed -r 1\na = 1", "%dist scale 3")
    cells = [NotebookCell(number, source) for number, source in enumerate(sources, 1)]
    made = exported(tmp_path / "train.py", cells)
    assert str(made).split("\n")[1:] == [
        f"Run it: PYTHONHASHSEED=0 torchrun --nproc-per-node 2 {tmp_path / 'train.py'}"
    ]
    assert "On 2 ranks of one machine" in made.script.text


def test_a_start_after_a_scale_has_its_own_ranks(tmp_path: Path) -> None:
    sources = ("%dist start -n 1", "%dist scale 2", "%dist stop", "%dist start -n 1", TRAIN)
    cells = [NotebookCell(number, source) for number, source in enumerate(sources, 1)]
    assert exported(tmp_path / "train.py", cells).script.options.n == 1


def test_a_script_has_the_ranks_that_a_cell_needs_which_a_scale_took_away(tmp_path: Path) -> None:
    sources = ("%dist start -n 4", "%%distributed -r 3\na = 1", "%dist scale 2", TRAIN)
    cells = [NotebookCell(number, source) for number, source in enumerate(sources, 1)]
    made = exported(tmp_path / "train.py", cells)
    assert made.script.options.n == 4


STEP = "%%distributed\noptimizer.step()"


@pytest.mark.parametrize(
    ("cells", "words", "why"),
    [
        ([(STEP, "failed")], {}, "cell 2 would train, and failed"),
        ([(STEP, "")], {"skip": "2"}, "cell 2 would train, and is skipped"),
        ([(STEP, "")], {"cells": "1"}, "cell 2 would train, and is not among --cells"),
    ],
)
def test_a_script_that_lost_its_training_is_refused_with_the_cell_that_trains(
    tmp_path: Path, cells: list[tuple[str, str]], words: dict[str, str], why: str
) -> None:
    made = [
        NotebookCell(number, source, trouble)
        for number, (source, trouble) in enumerate([(TRAIN, ""), *cells], 1)
    ]
    with pytest.raises(UsageError) as caught:
        exported(tmp_path / "train.py", made, **words)
    assert (caught.value.what, caught.value.why) == (
        "No optimizer steps in the script; nothing was written.",
        why,
    )
    assert list(tmp_path.iterdir()) == []


def test_a_cell_that_is_there_is_no_training_that_a_script_lost(tmp_path: Path) -> None:
    defined = NotebookCell(1, "%%distributed\ndef train(): optimizer.step()")
    called = NotebookCell(2, "%%distributed\ntrain()", losses={0: 1.0})
    with pytest.raises(UsageError) as caught:
        exported(tmp_path / "train.py", [defined, called], cells="2")
    assert caught.value.why == "cell 1 would train, and is not among --cells"
    of_a_library = NotebookCell(1, "%%distributed\nimport library; library.run()", losses={0: 1.0})
    assert exported(tmp_path / "train.py", [of_a_library], cells="1").script.cells == (1,)


def test_steps_of_a_run_that_failed_are_told(tmp_path: Path) -> None:
    cells = [NotebookCell(5, TRAIN, has_lost_steps=True)]
    assert exported(tmp_path / "train.py", cells).script.doubts == (
        (
            "Cell 5 has made steps in a run that failed, and the notebook's model has them: in the"
            " script it has not, unless its loop continued where it stood."
        ),
    )


def test_runs_in_another_order_and_more_than_one_are_told(tmp_path: Path) -> None:
    cells = [NotebookCell(5, TRAIN, runs=2), NotebookCell(3, TRAIN), NotebookCell(4, "x = 1")]
    assert exported(tmp_path / "train.py", cells).script.doubts == (
        "Cell 5 has run 2 times, and stands there once, as of the last.",
        "The cells ran last in another order than they stand there: 5, 3.",
    )


@pytest.mark.parametrize("option", ["cells", "skip"])
def test_numbers_of_cells_are_ranges_and_must_be_there(tmp_path: Path, option: str) -> None:
    with pytest.raises(UsageError, match=f"--{option} takes numbers of cells, such as 3,5-8"):
        exported(tmp_path / "a.py", CELLS, **{option: "3-"})
    with pytest.raises(UsageError, match=f"--{option} 2,7-9: there is no cell 7-9; cells are 1 to"):
        exported(tmp_path / "a.py", CELLS, **{option: "2,7-9"})


def test_a_file_knows_what_it_sends_what_has_not_run_and_what_was_retried(tmp_path: Path) -> None:
    def cell(source: str, count: int | None = 1, *outputs: str) -> dict[str, object]:
        told = [{"output_type": kind} for kind in outputs]
        made = {"cell_type": "code", "source": source, "outputs": told}
        return {**made, "execution_count": count}

    cells = [
        cell("import math\nk = 2\ndef f(x): return math.floor(x) * k"),
        cell("%dist push f\n%dist run other.py"),
        cell("%%distributed\na = f(1)", 3, "error"),
        cell("%dist retry"),
        cell("%%distributed\nb = 1", None),
    ]
    (path := tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells}))
    found = read_notebook(path, parse_dist)
    assert [one.trouble for one in found] == ["", "", "", "", "has not run"]
    assert [name for name, _ in found[1].sent[0].code] == ["k", "math", "f"]
    assert found[1].ran_code
