"""Why a cell cannot be part of a script, in words that follow `cell 5: it`. Pure."""

import ast
import warnings

_DRAWS = {"matplotlib", "plotly", "seaborn", "bokeh", "altair"}
_WIDGETS = {"ipywidgets", "ipympl", "anywidget", "IPython"}
_ASKS = {"input", "getpass", "breakpoint"}
_SHOWS = {"display", "clear_output", "get_ipython"}
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
    except SyntaxError as error:
        return _of_syntax(code, error)
    for node in ast.walk(tree):
        reason = _of_import(node) or _of_name(node)
        if reason:
            return reason
    return ""


def _of_syntax(code: str, error: SyntaxError) -> str:
    for line in code.split("\n"):
        word = line.strip()
        if word.startswith(("%", "!")):
            return f"has {word.split()[0]!r}, which only IPython understands"
        if "= %" in line or "= !" in line:
            return f"has {word!r}, which only IPython understands"
    if "await" in (error.msg or "") or "async" in (error.msg or ""):
        return "awaits at its top level, which a script cannot"
    return f"is no Python that a script can hold: {error.msg}, line {error.lineno}"


def _of_import(node: ast.AST) -> str:
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [node.module or ""]
    else:
        return ""
    for name in names:
        package = name.split(".")[0]
        if package in _DRAWS:
            return f"draws, with {package}"
        if package in _WIDGETS:
            return f"shows widgets or displays, with {package}"
    return ""


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
