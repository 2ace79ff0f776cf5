"""One save in a folder of an object store, where two that are begun at once would mix their files.

Such a store makes no folder for one alone. So a save writes a file of its own there and lists the
folder: with anything else in it, it withdraws. Whoever writes later lists later, so of two at least
one sees the other. Where both do, both withdraw and try again, each a random while later.

Main thread of rank 0; the folder is given as calls.
"""

import random
import time
import uuid
from collections.abc import Callable

ATTEMPTS = 6
_PAUSE_S = 0.1  # of the first; each next one takes up to twice as long

PREFIX = "claim-"


class FolderClaim:
    """A claim of a folder.

    Args:
        files: Returns the names of the files there.
        put: Writes an empty file of this name.
        remove: Deletes it.
    """

    def __init__(
        self,
        files: Callable[[], set[str]],
        put: Callable[[str], None],
        remove: Callable[[str], None],
    ) -> None:
        self.file = f"{PREFIX}{uuid.uuid4().hex}"
        self._files, self._put, self._remove = files, put, remove

    def stake(self) -> None:
        """Say that the folder is claimed."""
        self._put(self.file)

    def is_alone(self) -> bool:
        """Return whether nobody else has claimed or used the folder."""
        return self._files() <= {self.file}

    def withdraw(self) -> None:
        """Say so no longer."""
        self._remove(self.file)

    def take(self, pause: Callable[[float], None] = time.sleep) -> bool:
        """Return whether the folder is this save's; else nothing of it is left there."""
        for attempt in range(ATTEMPTS):
            self.stake()
            if self.is_alone():
                return True
            self.withdraw()
            if any(not name.startswith(PREFIX) for name in self._files()):
                return False
            pause(random.uniform(0, _PAUSE_S * 2**attempt))
        return False
