"""The private folder of a controller, with the keys in it: its kernel or itself ends it."""

import os
import shutil

OWNER_LOCK = "owner.lock"  # held while anybody needs the folder
KEYS = "security"  # as ipyparallel calls it


def remove(folder: str | os.PathLike[str]) -> None:
    """Remove a folder, its keys first: one who is killed in between leaves none without a lock."""
    shutil.rmtree(os.path.join(folder, KEYS), ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
