"""Where an export is written: under a name that is free, and means nothing else; whole, or not."""

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from nbdist.client.export.modules import imports
from nbdist.shared.errors import UsageError

_OF_JOBS = (".sbatch", ".sh", ".yaml")  # what lies around a script
_TAKEN = {*sys.stdlib_module_names, "nbdist", "numpy", "torch"}


def require_place(path: Path, *, force: bool) -> None:
    """Refuse a path that no script, or file of a job, can be written to.

    Raises:
        UsageError: It is one.
    """
    if path.suffix not in (".py", *_OF_JOBS):
        script = path.with_suffix(".py") if path.name else "train.py"
        raise UsageError(f"%dist export writes a script, such as {script}, not {path}.")
    if path.stem in _TAKEN:
        raise UsageError(
            f"A script called {path.name} would be imported in the place of Python's {path.stem}.",
            do=f"export to another name, such as train_{path.name}",
        )
    try:
        has_folder, is_folder, is_there = path.parent.is_dir(), path.is_dir(), path.exists()
    except OSError as error:  # such as a name that is too long
        raise _unwritable(path, error) from error
    if not has_folder:
        raise UsageError(f"There is no folder {path.parent} to write {path.name} to.")
    if is_folder:
        raise UsageError(f"{path} is a folder; give the name of a script in it.")
    if is_there and not force:
        raise UsageError(f"{path} is there already; --force overwrites it.")


def require_own_name(name: str, files: Mapping[str, str]) -> None:
    """Refuse a script that its own imports, or those of a driver beside it, would find.

    Args:
        name: The script's.
        files: What is to be written, by name.

    Raises:
        UsageError: It has such a name.
    """
    stem = Path(name).stem
    for file, text in files.items():
        if file.endswith(".py") and stem in imports(text):
            raise UsageError(
                f"A script called {name} would be imported in the place of the {stem} that {file}"
                " imports; nothing was written.",
                do=f"export to another name, such as train_{name}",
            )


def write_all(folder: Path, files: Mapping[str, str], *, force: bool) -> None:
    """Write all files: each gets its name when it may have it and all of them are complete.

    Raises:
        UsageError: They cannot be written there; it names those that were all the same.
    """
    for name in files:
        require_place(folder / name, force=force)
    made: dict[Path, Path] = {}
    placed: list[str] = []
    path = folder
    try:
        for name, text in files.items():
            path = folder / name
            made[path] = folder / f".{name}.new"
            made[path].write_text(text, encoding="utf-8")
        for path, new in made.items():
            new.replace(path)
            placed.append(path.name)
    except OSError as error:
        for new in made.values():
            with suppress(OSError):
                new.unlink(missing_ok=True)
        raise _unwritable(path, error, placed) from error


def _unwritable(path: Path, error: OSError, placed: Sequence[str] = ()) -> UsageError:
    written = f"before it, these were: {', '.join(placed)}" if placed else "nothing was"
    return UsageError(
        f"{path} cannot be written; {written}.",
        why=error.strerror or str(error),
        do="export to a folder that you may write to",
    )
