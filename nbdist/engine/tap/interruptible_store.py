"""A store whose waits can be ended: the ranks' way to the TCPStore.

torch's own client waits for a key inside C++, for as long as the group's timeout (30 min), and
nothing ends that wait but the key or the loss of the connection. A rank that makes a group
(`new_group`, a DeviceMesh) while a peer has failed would sit there. This store asks again and
again instead, and stops at once when `release` is called from another thread, or when Ctrl-C
arrives.
"""

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError

from nbdist.engine.compat.groups.torch_groups import Store, TCPStore
from nbdist.engine.kernel import backward_threads

_FIRST_PAUSE_S = 0.0002  # ranks that form a group arrive within a millisecond of each other
_LONGEST_PAUSE_S = 0.01


class ReleasedError(RuntimeError):
    """A wait in the store was ended by `release`, because a peer had failed."""


class PatientStore(Store):
    """A torch `Store` over a client of the TCPStore.

    C++ calls these methods by their names, hence the two in camel case. Any thread may call.
    torch's queues (`queue_push`, ...) are not passed on to stores written in Python.
    """

    timeout: timedelta  # torch's own; `set_timeout` changes it

    def __init__(self, client: TCPStore) -> None:
        super().__init__()
        self._client: Any = client  # its types lack half of its methods
        self._released = threading.Event()
        self._why = ""
        # time.monotonic(); the main thread, or its backward on another, is in `wait`.
        self.main_waits_since: float | None = None

    def release(self, why: str) -> None:
        """End every wait, now and until `resume`, with a ReleasedError. Any thread."""
        self._why = why
        self._released.set()

    def resume(self) -> None:
        """Allow waits again."""
        self._released.clear()

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return when all keys exist.

        Raises:
            ReleasedError: `release` was called.
            DistStoreError: They did not exist in time.
        """
        limit = self.timeout if timeout is None else timeout
        is_main = threading.current_thread() is threading.main_thread()
        is_mains = is_main or backward_threads.is_mains()
        if is_mains:
            self.main_waits_since = time.monotonic()
        try:
            if not self.wait_until(lambda: bool(self._client.check(keys)), limit):
                raise DistStoreError(
                    f"wait timeout after {limit.total_seconds():g} s, keys: {', '.join(keys)}"
                )
        finally:
            if is_mains:
                self.main_waits_since = None

    def wait_until(self, is_met: Callable[[], bool], limit: timedelta) -> bool:
        """Poll a condition; return False where it is not met in time.

        Raises:
            ReleasedError: `release` was called.
        """
        deadline = time.monotonic() + limit.total_seconds()
        pause_s = _FIRST_PAUSE_S
        while not is_met():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            if self._released.wait(min(pause_s, left_s)):
                raise ReleasedError(self._why)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return True

    def get(self, key: str) -> bytes:
        """Return the key's value, once it exists."""
        self.wait([key])
        value: bytes = self._client.get(key)
        return value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return the values of all keys, once they exist."""
        self.wait(keys)
        values: list[bytes] = self._client.multi_get(keys)
        return values

    def set(self, key: str, value: Any) -> None:
        """Set the key."""
        self._client.set(key, value)

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        """Set all keys."""
        self._client.multi_set(keys, values)

    def append(self, key: str, value: Any) -> None:
        """Append to the key's value."""
        self._client.append(key, value)

    def add(self, key: str, value: int) -> int:
        """Add to the number under the key; returns the sum."""
        return int(self._client.add(key, value))

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Set the key if it has the expected value; returns its value afterwards."""
        value: bytes = self._client.compare_set(key, expected, desired)
        return value

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys exist."""
        return bool(self._client.check(keys))

    def has_extended_api(self) -> bool:
        """Return whether `append`, `multi_get` and `multi_set` work."""
        return True

    def deleteKey(self, key: str) -> bool:
        """Delete the key; returns whether it existed."""
        return bool(self._client.delete_key(key))

    def getNumKeys(self) -> int:
        """Return the number of keys."""
        return int(self._client.num_keys())

    def clone(self) -> "PatientStore":
        """Return this store: its client may be used from every thread."""
        return self
