"""Let tqdm's bars for notebooks draw text on a rank.

`tqdm.auto` (which Lightning, Accelerate and transformers use) and `tqdm.notebook` take an engine
for a notebook and make widgets. Those would show after the cell only, one rank's of many, and be
dead in the notebook when it is opened again: a widget's state lives in the page, not in the
file. As text a bar moves while the cell runs, for every rank, and stays.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

_MODULE = "tqdm.notebook"


def install() -> None:
    """From now on, `tqdm.notebook` is ours; loads nothing, and a second call changes nothing."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return spec_from_loader(fullname, _Loader()) if fullname == _MODULE else None


class _Loader(Loader):
    def exec_module(self, module: ModuleType) -> None:
        # tqdm.auto asks for `IProgress` here, finds none, and takes its bars of text.
        bar = _text_bar(importlib.import_module("tqdm.std").tqdm)
        names = module.__dict__
        names["tqdm"] = names["tqdm_notebook"] = bar
        names["trange"] = names["tnrange"] = lambda *args, **options: bar(range(*args), **options)


def _text_bar(tqdm: Any) -> Any:
    """Return tqdm's class for text, with the arguments of its bars for notebooks."""

    class tqdm_notebook(tqdm):  # type: ignore[misc]  # its name in tqdm; tqdm ships no types
        def __init__(self, *args: Any, **options: Any) -> None:
            options.pop("display", None)  # whether to show its widget at once
            if isinstance(options.get("ncols"), str):  # a width for a web page: "100%", "400px"
                del options["ncols"]
            super().__init__(*args, **options)

    return tqdm_notebook
