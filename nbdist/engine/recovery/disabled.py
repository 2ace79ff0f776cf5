"""Modules that must not be used any more: their next forward raises, and says why.

A rank that went on with a model whose shards are lost, or whose group is gone, would compute
something wrong or wait for ever. What cannot be recovered is refused here, on every rank.

Threads: the main one. No torch but `nn`, no process group.
"""

from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from nbdist.shared.errors import NBDistError


class Refusals:
    """The modules that are refused, with their errors."""

    def __init__(self) -> None:
        self._refused: WeakKeyDictionary[nn.Module, tuple[NBDistError, Any]] = WeakKeyDictionary()

    def refuse(self, module: nn.Module, error: NBDistError) -> None:
        """Raise `error` at every forward of `module` from here on, before any other hook runs.

        A module that is refused already keeps the first error: it names the cause.
        """
        if module not in self._refused:
            handle = module.register_forward_pre_hook(partial(_raise, error), prepend=True)
            self._refused[module] = (error, handle)

    def allow(self, module: nn.Module) -> None:
        """Take a refusal back; harmless where there is none."""
        _, handle = self._refused.pop(module, (None, None))
        if handle is not None:
            handle.remove()

    def refused(self) -> list[tuple[nn.Module, NBDistError]]:
        """Return every refused module that is alive, with its error."""
        return [(module, error) for module, (error, _) in list(self._refused.items())]


def _raise(error: NBDistError, _module: nn.Module, _args: object) -> None:
    # A new object each time: one that is raised twice would carry both tracebacks.
    raise type(error)(error.what, why=error.why, do=error.do)


here = Refusals()
