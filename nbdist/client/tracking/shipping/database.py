"""Make the SQLite file that MLflow keeps its runs in, whole or not at all, and say what is wrong.

MLflow makes some sixty tables in a new file, for seconds. A process that ends meanwhile (its
kernel was shut down) would leave half of them, a file that MLflow refuses from then on. So the
tables are made in a file beside it, which gets its name when it is complete.

What is wrong with a file is asked of SQLite itself: MLflow waits for up to a minute, and words it
as it is worded by the layers below it.
"""

import contextlib
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

from nbdist.client.tracking.settings import DATABASE, own_database

_PATIENCE_S = 1.0  # MLflow's own writers hold the lock for milliseconds
_SQLITE = "sqlite:///"
# By the names of SQLite's codes: each stands for itself and for those that are more exact.
_TROUBLES = {
    "SQLITE_BUSY": "another program holds the database locked",
    "SQLITE_LOCKED": "another program holds the database locked",
    "SQLITE_READONLY": "the database is read-only",
    "SQLITE_PERM": "no permission to open the database",
    "SQLITE_CANTOPEN": "no permission to open the database",
    "SQLITE_FULL": "the disk is full",
    "SQLITE_NOTADB": "the file is damaged: move it away, and a new one is created",
    "SQLITE_CORRUPT": "the file is damaged: move it away, and a new one is created",
}


def path_of(uri: str) -> Path | None:
    """Return the file of an SQLite database's URI; None for any other."""
    if not uri.startswith(_SQLITE):
        return None
    return Path(uri.removeprefix(_SQLITE).partition("?")[0])


def trouble(uri: str) -> str:
    """Return why nothing can be written into an SQLite file, for people; "" where it can be.

    A file that is not there will be made, and of other databases nothing is known. Waits a second
    at most.
    """
    path = path_of(uri)
    if path is None or not path.exists():
        return ""
    # A journal is made beside the file. SQLite tells of this late, or as an error of the disk.
    if not (os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)):
        return _TROUBLES["SQLITE_READONLY"]
    try:
        with contextlib.closing(
            sqlite3.connect(path, timeout=_PATIENCE_S, isolation_level=None)
        ) as database:
            database.execute("BEGIN IMMEDIATE")
            database.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
            database.execute("ROLLBACK")
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorname", "")
        known = (words for name, words in _TROUBLES.items() if code.startswith(name))
        return next(known, f"SQLite says: {error}")
    return ""


def is_missing(folder: Path, uri: str) -> bool:
    """Return whether `uri` is the private folder's own database and does not exist yet."""
    return uri == own_database(folder) and not (folder / DATABASE).exists()


def make(folder: Path, make_tables: Callable[[str], object]) -> None:
    """Make the folder's database. One process at a time: the caller holds a lock.

    Args:
        folder: The private folder.
        make_tables: Makes MLflow's tables in the database of the URI it is given.
    """
    unfinished = folder / f"{DATABASE}.new"
    for leftover in (unfinished, folder / f"{DATABASE}.new-journal"):
        with contextlib.suppress(FileNotFoundError):
            leftover.unlink()
    make_tables(f"sqlite:///{unfinished.absolute()}")
    os.replace(unfinished, folder / DATABASE)
