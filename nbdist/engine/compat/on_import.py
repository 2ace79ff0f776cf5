"""Do something to a module once it has been imported, and import nothing for it.

Libraries that a cell may or may not use are adapted this way: a rank that never imports them pays
nothing. What fails here is logged and steps aside; the import goes on.
"""

import importlib.machinery
import logging
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

Adapt = Callable[[Any], None]  # gets the module

_log = logging.getLogger("nbdist.on_import")
_wanted: dict[str, Adapt] = {}


def adapt(name: str, function: Adapt) -> None:
    """Call `function` with the module `name` when it is imported, or now, if it is already.

    A second call for the same module changes nothing.
    """
    if name in _wanted:
        return
    _wanted[name] = function
    if name in sys.modules:
        _adapt(sys.modules[name])
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _adapt(module: ModuleType) -> None:
    try:
        _wanted[module.__name__](module)
    except Exception:
        _log.exception("%s could not be adapted and stays as it is", module.__name__)


class _Finder(MetaPathFinder):
    """Lets the other finders find, and comes in after the module's own code has run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _wanted:
            return None
        others = (finder for finder in sys.meta_path if not isinstance(finder, _Finder))
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            native = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                native(module)
                _adapt(module)

            loader.exec_module = exec_module  # this loader was made for this module
        return spec
