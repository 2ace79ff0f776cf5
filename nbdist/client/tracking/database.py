"""Make the SQLite file that MLflow keeps its runs in, whole or not at all.

MLflow makes some sixty tables in a new file, for seconds. A process that ends meanwhile (its
kernel was shut down) would leave half of them, a file that MLflow refuses from then on. So the
tables are made in a file beside it, which gets its name when it is complete.
"""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from nbdist.client.tracking.settings import DATABASE, own_database


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
