"""The private folders beside the notebook: `.nbdist` and the logs of each cluster.

Beside a notebook whose folder cannot be written to, or is gone, they are in the temp folder.
"""

import contextlib
import hashlib
import os
import tempfile
import time
from pathlib import Path

from nbdist.shared import gpu_errors
from nbdist.shared.errors import StartError


def current_folder() -> Path | None:
    """Return the current folder, where Jupyter starts a kernel; None when it has been deleted."""
    try:
        return Path.cwd()
    except OSError:
        return None


def project_folder(place: Path | None) -> Path:
    """Return `.nbdist` beside the notebook (0700, ignored by git), making it if need be.

    Where that cannot be written to it is one in the temp folder, the same for the same `place`.

    Args:
        place: The notebook's folder; None when it is gone.

    Raises:
        StartError: There is no place for it in the temp folder either.
    """
    if place is not None:
        folder = place / ".nbdist"
        try:
            make_private(folder)
            if os.access(folder, os.W_OK | os.X_OK):
                return folder
        except OSError:
            pass  # a folder that others gave, or that has been deleted: not our notebook's to fix
    spare = _spare_place(place)
    try:
        spare.mkdir(mode=0o700, exist_ok=True)
        # In the temp folder anyone may have made it before us.
        if spare.is_symlink() or spare.stat().st_uid != os.getuid():
            spare = Path(tempfile.mkdtemp(prefix="nbdist_"))
        spare.chmod(0o700)
        make_private(spare / ".nbdist")
    except OSError as error:
        raise _folder_error(spare, error) from error
    return spare / ".nbdist"


def _spare_place(place: Path | None) -> Path:
    # Not `nbdist-`: those are the folders of keys, which go with their controller.
    digest = hashlib.sha1(os.fsencode(place or ""), usedforsecurity=False).hexdigest()[:10]
    return Path(tempfile.gettempdir()) / f"nbdist_{os.getuid()}_{digest}"


def say_where(folder: Path, place: Path | None) -> str:
    """Return a sentence where logs and runs are not beside the notebook; else nothing."""
    if place is None:
        return f"The notebook's folder is gone: logs and runs are kept in {folder}."
    if folder.parent == place:
        return ""
    return f"{place / '.nbdist'} cannot be written to: logs and runs are kept in {folder}."


def work_folders(place: Path | None) -> list[str]:
    """Return where a rank may work, best first: the next where one is gone.

    Args:
        place: The folder the notebook was in when the cluster was started.
    """
    chosen = [current_folder(), place, Path.home(), Path(tempfile.gettempdir())]
    return list(dict.fromkeys(str(folder) for folder in chosen if folder is not None))


def living_logs(logs: Path) -> Path:
    """Return `logs`, or another such folder where it has been deleted or moved.

    Raises:
        StartError: None can be made.
    """
    if logs.is_dir():
        return logs
    place = logs.parents[2]
    return log_folder(project_folder(place if place.is_dir() else current_folder()))


def make_private(folder: Path) -> None:
    """Make `folder` for its owner alone (0700), with a `.gitignore` that ignores all of it.

    Raises:
        OSError: It cannot be made or written to.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(OSError):  # somebody else's, which they have given
        folder.chmod(0o700)
    ignore = folder / ".gitignore"
    # One that is empty is of a process that was killed as it wrote it.
    if not ignore.exists() or ignore.stat().st_size == 0:
        ignore.write_text("*\n")


def log_folder(folder: Path) -> Path:
    """Return a new folder (0700) for the logs of the cluster that starts now.

    Raises:
        StartError: It cannot be made.
    """
    logs = folder / "logs" / time.strftime(f"%Y%m%d-%H%M%S-{os.getpid()}")
    try:
        # One by one: `parents=True` would make the folder in between readable to all.
        for part in (logs.parent, logs):
            part.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise _folder_error(logs, error) from error
    return logs


def last_lines(file: Path, count: int = 5) -> str:
    """Return the end of a log, to be shown in an error; never raises for the log itself."""
    try:
        with file.open("rb") as opened:
            opened.seek(max(0, opened.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = opened.read(_TAIL_BYTES).decode(errors="replace").strip().splitlines()
    except OSError:
        return f"no log at {file}"
    telling = [line for line in text if not any(noise in line for noise in _NOISE)]
    return "\n     ".join(telling[-count:]) or f"its log {file} has no relevant lines"


_TAIL_BYTES = 256 * 1024  # NCCL's own log may have gigabytes
# What every healthy rank logs, too.
_NOISE = ("CurveZMQ", "debugpy_stream")


def fix_for_start(why: str) -> str:
    """Return what to do about a start that failed, where its `why` shows that."""
    if "oo many open files" in why:
        return "allow more of them: ulimit -n 4096 in the shell that starts Jupyter."
    if "No space left on device" in why or "Disk quota exceeded" in why:
        return "free space where the logs are, or %cd to another disk."
    known = gpu_errors.explain(why)
    return (known and known.do) or "%dist doctor"


def _folder_error(folder: Path, error: OSError) -> StartError:
    return StartError(
        f"{folder} for logs, runs and checkpoints cannot be created.",
        why=error.strerror or str(error),
        do="free space, or set TMPDIR to a folder of yours.",
    )
