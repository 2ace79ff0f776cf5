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


class OnImport(MetaPathFinder):
    """Lets the other finders find, and comes in after a module's own code has run."""

    def __init__(self) -> None:
        self._wanted: dict[str, Adapt] = {}

    def adapt(self, name: str, function: Adapt) -> None:
        """Call `function` with the module `name` when it is imported, or now, if it is already.

        A second call for the same module changes nothing.
        """
        if name in self._wanted:
            return
        self._wanted[name] = function
        if name in sys.modules:
            self._adapt(sys.modules[name])
        elif self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find a module that is to be adapted, by the others; Python asks for each import."""
        if fullname not in self._wanted:
            return None
        others = (finder for finder in sys.meta_path if not isinstance(finder, OnImport))
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            native = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                native(module)
                self._adapt(module)

            loader.exec_module = exec_module  # this loader was made for this module
        return spec

    def _adapt(self, module: ModuleType) -> None:
        try:
            self._wanted[module.__name__](module)
        except Exception:
            _log.exception("%s could not be adapted and stays as it is", module.__name__)


here = OnImport()
