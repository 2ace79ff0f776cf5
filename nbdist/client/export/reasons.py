"""Why a cell cannot be part of a script, in words that follow `cell 5: it`. Pure."""

import ast
import warnings

_ASKS = {"input", "getpass", "breakpoint"}
_SHOWS = {"get_ipython"}
# Of nbdist, what needs a notebook.
_NOTEBOOK = {"current", "start", "attach", "Session", "publish"}


def why_not(code: str) -> str:
    """Return why code cannot stand in a script; "" where it can.

    Args:
        code: Of a cell, without its `%%distributed` line.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an invalid escape: the script says it
            tree = ast.parse(code)
            compile(code, "<cell>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        return _of_syntax(error)
    return next(filter(None, map(_of_name, ast.walk(tree))), "")


def _of_syntax(error: SyntaxError | ValueError) -> str:
    told = getattr(error, "msg", None) or str(error)  # null bytes have no line
    if "await" in told or "async" in told:
        return "awaits at its top level, which a script cannot"
    line = getattr(error, "lineno", None)
    return f"is no Python that a script can hold: {told}{f', line {line}' if line else ''}"


def _of_name(node: ast.AST) -> str:
    if isinstance(node, ast.Call):
        called = node.func
        if isinstance(called, ast.Name) and called.id in _ASKS:
            return f"asks somebody, with {called.id}()"
        if isinstance(called, ast.Name) and called.id in _SHOWS:
            return f"calls {called.id}(), which only a notebook has"
    if (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "nbdist"
        and node.attr in _NOTEBOOK
    ):
        return f"calls nbdist.{node.attr}, which needs a notebook"
    return ""
