"""A cell's source as the Python that IPython makes of it, with magics and `await` at the top.

Pure. None where it still is not valid Python.
"""

import ast
import re
import types
from collections.abc import Iterator

from IPython.core.inputtransformer2 import TransformerManager

_BY_TEXT = {"run_line_magic", "run_cell_magic", "system", "getoutput"}  # of IPython's shell
_WORD = re.compile(r"[A-Za-z_]\w*")


def tree(source: str) -> ast.Module | None:
    """Return a cell's syntax tree."""
    found = _parsed(source)
    return found if found is not None else _parsed(_transformed(source))


def compiled(source: str) -> types.CodeType | None:
    """Return a cell's code, which may await."""
    found = tree(source)
    try:
        code = found and compile(found, "cell", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    except (SyntaxError, ValueError):  # `return` at the top, say
        return None
    return code if isinstance(code, types.CodeType) else None


def words_of_magics(cell: ast.Module) -> Iterator[str]:
    """Yield the words in the texts of a cell's magics: each may be a name that is read or set."""
    calls = [node for node in ast.walk(cell) if isinstance(node, ast.Call)]
    for call in calls:
        shell, _, name = ast.unparse(call.func).rpartition(".")
        if shell == "get_ipython()" and name in _BY_TEXT:
            for text in call.args:
                yield from _WORD.findall(ast.unparse(text))


def _parsed(source: str) -> ast.Module | None:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError):  # a null byte is a ValueError before Python 3.12
        return None


def _transformed(source: str) -> str:
    try:
        return TransformerManager().transform_cell(source)
    except SyntaxError:
        return source
