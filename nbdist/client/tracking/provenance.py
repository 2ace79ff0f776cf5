"""Say where a run came from: notebook, commit, versions, packages. Nothing secret, nothing slow.

Threads: everything here runs on the tracker's own thread, off the way of cells.
"""

import getpass
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path

# The environment is written down by this list alone: variables hold tokens and passwords.
ALLOWED_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "GLOO_SOCKET_IFNAME",
    "MKL_NUM_THREADS",
    "NCCL_ALGO",
    "NCCL_DEBUG",
    "NCCL_IB_DISABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_PROTO",
    "NCCL_SOCKET_IFNAME",
    "OMP_NUM_THREADS",
    "PYTORCH_CUDA_ALLOC_CONF",
    "SLURM_JOB_ID",
)
_GIT_TIMEOUT_S = 2.0


def notebook_path(
    environment: Mapping[str, str] = os.environ, names: Mapping[str, object] | None = None
) -> Path | None:
    """Return the notebook this kernel serves, as far as its editor says.

    A Jupyter server tells it in the environment, VS Code in a variable of the notebook's own.

    Args:
        environment: The kernel's.
        names: The notebook's variables; those of this kernel when None.
    """
    by_editor = (_variables() if names is None else names).get("__vsc_ipynb_file__")
    for name in (environment.get("JPY_SESSION_NAME", ""), by_editor):
        if isinstance(name, str) and name.endswith(".ipynb"):
            return Path(name)
    return None


def _variables() -> Mapping[str, object]:
    from IPython.core.getipython import get_ipython

    shell = get_ipython()
    return shell.user_ns if shell is not None else {}


def notebook_name(
    environment: Mapping[str, str] = os.environ, names: Mapping[str, object] | None = None
) -> str:
    """Return the notebook's name without its ending; "notebook" when it is not known."""
    path = notebook_path(environment, names)
    return path.stem if path else "notebook"


def source_tags(experiment: str, cell: int, folder: Path) -> dict[str, str]:
    """Return the tags that say what code, by whom, with which versions made a run.

    Args:
        experiment: Stands in for the notebook's name where that is not known.
        cell: The cell's number.
        folder: The notebook's folder; its git commit is the run's.
    """
    path = notebook_path()
    name = path.name if path else f"{experiment}.ipynb"
    tags = {
        "mlflow.source.type": "NOTEBOOK",
        "mlflow.source.name": name,
        "nbdist.notebook": name,
        "nbdist.cell": str(cell),
        "nbdist.version": nbdist_version(),
        "nbdist.python": platform.python_version(),
    }
    try:
        tags["mlflow.user"] = getpass.getuser()
    except (OSError, KeyError):
        # A container may run as a number without a name.
        tags["mlflow.user"] = str(os.getuid())
    return tags | git_tags(folder)


def nbdist_version() -> str:
    """Return nbdist's version, "source" when it runs from a folder that was never installed."""
    try:
        return metadata.version("nbdist")
    except metadata.PackageNotFoundError:
        return "source"


def git_tags(folder: Path) -> dict[str, str]:
    """Return the commit of `folder` and whether it has changes; empty outside of a repository."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return {}
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    state = "unknown" if changes is None else str(bool(changes)).lower()
    return {"mlflow.source.git.commit": commit, "nbdist.git_dirty": state}


def _git(folder: Path, *command: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *command],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=_GIT_TIMEOUT_S,
            # Looking must not take the lock that a commit in a terminal needs.
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
            start_new_session=True,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        # No git, no repository, or one too large to ask in time: the run is tracked without.
        return None
    return done.stdout.decode(errors="replace").strip()


def environment_text(
    search_path: Iterable[str] | None = None, variables: Mapping[str, str] = os.environ
) -> str:
    """Return the installed packages as `name==version`, and the variables that are no secret.

    Reads the names of `*.dist-info` folders alone: milliseconds, where reading the metadata of
    some hundred packages takes a good part of a second of the kernel's GIL.
    """
    packages: dict[str, str] = {}
    for folder in sys.path if search_path is None else search_path:
        try:
            names = os.listdir(folder or ".")
        except OSError:
            continue  # a zip, or a folder that is gone
        for name in names:
            stem, dot, _ = name.partition(".dist-info")
            package, dash, version = stem.rpartition("-")
            if dot and dash:
                # The first folder on the path wins, as it does for `import`.
                packages.setdefault(package.lower().replace("_", "-"), version)
    lines = [f"# Python {platform.python_version()} on {platform.platform()}"]
    lines += [f"# {name}={variables[name]}" for name in ALLOWED_VARIABLES if name in variables]
    lines += [f"{name}=={packages[name]}" for name in sorted(packages)]
    return "\n".join(lines) + "\n"
