"""A notebook whose folder is deleted, moved, or cannot be written to: its ranks go on."""

from pathlib import Path

import pytest

from tests.lifecycle.kernels import Notebook


def notebook_in(folder: Path) -> Notebook:
    """Return a notebook in a folder that it shares with nothing of Jupyter's and of the system."""
    folder.mkdir()
    temp = folder.parent / "temp"
    temp.mkdir()
    return Notebook(folder, TMPDIR=str(temp), IPYTHONDIR=str(folder.parent / "ipython"))


SUM = "_t = torch.ones(1); dist.all_reduce(_t); print('sum', _t.item(), kept)"
DIE = "import os, signal\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()"


def assert_whole(notebook: Notebook, n: int = 2) -> str:
    said = notebook.on_ranks(SUM)
    assert f"sum {n}.0 5" in said, said
    assert "Error" not in said, said
    return said


@pytest.mark.parametrize(
    "lost",
    [
        "shutil.rmtree(os.getcwd())",
        pytest.param("os.rename(os.getcwd(), os.getcwd() + '-moved')", marks=pytest.mark.slow),
        pytest.param("shutil.rmtree('.nbdist')", marks=pytest.mark.slow),
    ],
)
def test_ranks_are_replaced_without_the_folder_they_began_in(tmp_path: Path, lost: str) -> None:
    folder = tmp_path / "notebook"
    with notebook_in(folder) as notebook:
        notebook.start()
        notebook.on_ranks("kept = 5")
        notebook.run(f"import os, shutil\n{lost}")
        said = notebook.run("%dist restart -r 1")
        assert "Traceback" not in said, said
        said = assert_whole(notebook)
        assert (f"{folder} is gone: rank 1 works in " in said) == ("rmtree(os.getcwd" in lost)
        said = notebook.on_ranks(DIE)
        assert "Rank 1" in said, said
        assert_whole(notebook)
        said = notebook.run("%dist scale 3")
        assert "Traceback" not in said, said
        assert_whole(notebook, 3)
        if "getcwd" in lost:
            assert not folder.exists()
        said = notebook.run("%dist stop") + notebook.run("%dist start -n 2 --device cpu")
        assert "Started 2 ranks" in said, said
        if "rmtree(os.getcwd" in lost:
            assert "The notebook's folder is gone: logs and runs are kept in " in said


@pytest.mark.slow
def test_a_folder_that_cannot_be_written_to_starts_with_its_logs_elsewhere(tmp_path: Path) -> None:
    folder = tmp_path / "notebook"
    with notebook_in(folder) as notebook:
        (folder / ".nbdist").write_text("a file, for root may write to a read-only folder")
        said = notebook.run("%load_ext nbdist\n%dist start -n 2 --device cpu")
        assert "Started 2 ranks" in said, said
        assert "cannot be written to: logs and runs are kept in " in said
        said = notebook.on_ranks("nbdist.log(loss=1.0)\nkept = 5")
        assert "Error" not in said, said
        assert_whole(notebook)
        said = notebook.run("%dist runs")
        assert "loss" in said, said
