"""Wait for an event, within a time that is only there for what went wrong."""

import time
from collections.abc import Callable
from typing import Any


def wait_until(happened: Callable[[], Any], what: str, timeout_s: float = 60) -> Any:
    """Return the first true value of `happened()`.

    Raises:
        AssertionError: it did not come within `timeout_s`; the message names `what`.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        value = happened()
        if value:
            return value
        assert time.monotonic() < deadline, f"waited {timeout_s} s in vain: {what}"
        time.sleep(0.01)
