"""Compile a rank's cells so that tracebacks, warnings and logs show their lines.

A compat module, as `shell.py` is. Tried with ipykernel 7.4. Used is `XCachingCompiler`, which names
a cell's file, keeps its lines, heads a frame in a traceback, and compiles what cell magics run.
"""

import ast
import copy
import os
import re
import sys
import tempfile
from typing import Any, Final

from ipykernel.compiler import XCachingCompiler

from nbdist.engine.kernel import location
from nbdist.shared import origins

_CELL_MAGIC: Final = re.compile(r"(\s*)(%%.*)", re.DOTALL)  # a cell that begins with one


class CellCompiler(XCachingCompiler):
    """Compiles cells for tracebacks that show their lines, by names that are equal on all ranks.

    ipykernel's names hold the process id; warnings and logs show them, and with the same name what
    all ranks say appears once. A script that runs as a cell keeps its own name.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._magic_at: dict[str, int] = {}  # the line of a cell's magic, by the cell's file

    def get_code_name(self, raw_code: str, transformed_code: str, number: int) -> str:
        """Return the file of a cell."""
        own = origins.cell_file_name(raw_code)
        file = location.here.script or os.path.join(tempfile.gettempdir(), origins.CELLS, own)
        location.here.name_cell(file, number)
        return file

    def format_code_name(self, name: str) -> tuple[str, str] | None:
        """Return how a traceback names a file: None lets it name the file itself."""
        prompt = location.here.prompt_of(name) if origins.is_cell(name) else 0
        return ("Cell", f"In[{prompt}]") if prompt else None

    def cache(self, transformed_code: str, number: int = 0, raw_code: str | None = None) -> str:
        """Keep the lines of a cell, also below a cell magic, which IPython makes one line of."""
        magic = _CELL_MAGIC.match(raw_code or "")
        if magic is None:
            return str(super().cache(transformed_code, number, raw_code))
        file = str(super().cache(f"{magic[1]}# {magic[2]}", number, raw_code))
        self._magic_at[file] = magic[1].count("\n") + 1
        return file

    def __call__(self, source: Any, filename: str, symbol: str, *more: Any, **options: Any) -> Any:
        """Compile a cell; or what its cell magic runs, of which IPython says `<timed exec>`."""
        if filename in self._magic_at:
            source = _moved(source, self._magic_at[filename] - 1)
        elif filename.startswith("<") and (place := location.here.cell_place(sys._getframe())):
            file, line = place
            if line == self._magic_at.get(file):
                source, filename = _moved(source, line), file
        return super().__call__(source, filename, symbol, *more, **options)


def _moved(source: Any, lines: int) -> Any:
    """Return code that begins so many lines further down."""
    if isinstance(source, ast.AST):
        # A copy: %%timeit compiles its tree twice.
        return ast.increment_lineno(copy.deepcopy(source), lines)
    return "\n" * lines + source if isinstance(source, str) else source


def check() -> list[str]:
    """Return what no longer fits the installed ipykernel; empty if all fits."""
    names = ("__call__", "cache", "format_code_name", "get_code_name")
    gone = [name for name in names if not hasattr(XCachingCompiler, name)]
    return [f"ipykernel: XCachingCompiler.{name} is gone" for name in gone]
