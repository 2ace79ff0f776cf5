"""What is built from this folder holds everything, and works without the folder."""

import configparser
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from tests.cluster.conftest import Kernel

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


def installed(wheel: Path, folder: Path) -> tuple[Path, Path]:
    """Install the wheel in an environment of its own; return its Python and its packages."""
    venv.create(folder / "env", system_site_packages=False, with_pip=False, symlinks=True)
    (site,) = (folder / "env" / "lib").glob("python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:  # what an installer does with a pure wheel
        archive.extractall(site)
    return folder / "env" / "bin" / "python", site


def test_an_installed_wheel_runs_without_the_repository(wheel: Path, tmp_path: Path) -> None:
    python, site = installed(wheel, tmp_path)
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


def readme_cells() -> list[str]:
    """Return the first cells of the README, for two ranks on the CPU."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    start = "%dist start -n 4            # one rank per GPU, or CPU ranks with --device cpu"
    assert start in blocks[0]
    load, starts = blocks[0].replace(start, "%dist start -n 2 --device cpu").splitlines()
    return [load, starts, blocks[1]]


def test_an_installed_wheel_runs_the_readme_in_a_kernel_once_that_is_new_enough(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python, site = installed(wheel, tmp_path)
    # What nbdist needs, of this environment: names here are found after those of the wheel.
    (site / "needed.pth").write_text(sysconfig.get_path("purelib"))
    monkeypatch.setattr("tests.cluster.conftest.sys.executable", str(python))
    kernel = Kernel(tmp_path, PYTHONPATH="")
    try:
        load, start, training = readme_cells()
        kernel.run("import IPython; new, IPython.__version__ = IPython.__version__, '7.34.0'")
        refused = kernel.run(load).error
        assert refused is not None
        assert refused[0] == "UsageError"
        assert refused[1].startswith(
            "This kernel has imported ipython 7.34.0, and nbdist needs ipython>="
        )
        assert "restart the kernel" in refused[1]

        kernel.run("IPython.__version__ = new")
        assert kernel.run(load).error is None
        where = kernel.run("import nbdist; print(nbdist.__file__)").text
        assert where == str(site / "nbdist" / "__init__.py")
        assert "Started 2 ranks on cpu, gloo." in kernel.run(start, timeout_s=60).text
        assert kernel.cell("nbdist.__file__").text == f"ranks 0-1 │ Out: '{where}'"
        trained = kernel.run(training, timeout_s=60)
        assert trained.error is None
        assert 'Saved as MLflow run "first".' in trained.text
        assert kernel.run("import sys; 'torch' in sys.modules").text == "False"
    finally:
        kernel.close()
