"""Have no autocast lower a precision for a while, wherever a program enters one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def without_autocast(entered: set[torch.dtype]) -> Iterator[None]:
    """Switch off each autocast that is entered within the block, and add its dtype to `entered`.

    torch has no switch for it: an inner autocast overrides an outer one. Those that are on before
    the block stay as they are. Main thread.
    """
    native: Callable[[Any], Any] = torch.autocast.__enter__

    def enter(self: Any) -> Any:
        given = native(self)
        if torch.is_autocast_enabled(self.device):
            entered.add(torch.get_autocast_dtype(self.device))
            torch.set_autocast_enabled(self.device, False)  # its own exit puts back what was before
        return given

    torch.autocast.__enter__ = enter  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__enter__ = native  # type: ignore[method-assign]
