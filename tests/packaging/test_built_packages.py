"""What is built from this folder holds everything, and works without the folder."""

import configparser
import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def expected(folder: str, pattern: str) -> set[str]:
    """Return the files of the repository that match, as git would list them."""
    done = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", folder],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        names = done.stdout.split()
    else:  # an unpacked sdist has no git
        names = [str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*")]
    return {name for name in names if Path(name).match(pattern) and (ROOT / name).exists()}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the wheel, built from the sdist, and the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (path,) = built.glob("*.whl")
    return path


def test_the_wheel_holds_every_module_the_sanitizer_and_the_tutorials(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())

    modules = expected("nbdist", "*.py")
    assert len(modules) > 20
    assert modules <= names
    assert {"nbdist/py.typed", "nbdist/nbval_sanitize.cfg"} <= names
    assert expected("nbdist/client/board/live/page", "*.js") <= names
    notebooks = expected("notebooks", "*.ipynb")
    assert {name.replace("notebooks/", "nbdist/_notebooks/") for name in notebooks} <= names


def test_the_wheel_holds_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()

    data = "nbdist-0.1.0.data"
    assert {name.split("/")[0] for name in names} == {"nbdist", data, "nbdist-0.1.0.dist-info"}
    of_jupyterlab = expected("nbdist/labextension", "*.js*")
    assert {name for name in names if name.startswith(data)} == {
        name.replace("nbdist/labextension", f"{data}/data/share/jupyter/labextensions/nbdist")
        for name in of_jupyterlab
    }
    assert not [name for name in names if "__pycache__" in name or "/." in name]
    assert "nbdist-0.1.0.dist-info/licenses/LICENSE" in names


def test_the_wheel_gives_the_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        entry_points = archive.read("nbdist-0.1.0.dist-info/entry_points.txt").decode()

    parser = configparser.ConfigParser()
    parser.read_string(entry_points)
    assert dict(parser["console_scripts"]) == {"nbdist": "nbdist.cli:main"}


def test_the_sdist_holds_what_is_needed_to_build_test_and_read(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}

    top = {"pyproject.toml", "Makefile", "LICENSE", "CHANGELOG.md", "ARCHITECTURE.md"}
    top |= {"constraints.txt", "constraints-torch.txt", "environment.yml", ".ci/run"}
    assert top <= names
    for folder, pattern in (("nbdist", "*.py"), ("tests", "*.py"), ("notebooks", "*.ipynb")):
        assert expected(folder, pattern) <= names


def test_an_installed_wheel_runs_without_the_repository(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "env", system_site_packages=False, with_pip=False, symlinks=True)
    python = tmp_path / "env" / "bin" / "python"
    (site,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:  # what an installer does with a pure wheel
        archive.extractall(site)
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}

    def nbdist(code: str) -> str:
        done = subprocess.run(
            [str(python), "-c", code],
            cwd=tmp_path,
            env=clean,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert nbdist("from nbdist.cli import version; print(version())") == "0.1.0"
    folder = nbdist("from nbdist.cli import notebooks_folder; print(notebooks_folder())")
    assert folder == str(site / "nbdist" / "_notebooks")
