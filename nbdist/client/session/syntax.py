"""Check a cell's syntax in the notebook, so that a cell that cannot run reaches no rank."""

import ast
import warnings

from nbdist.errors import CellSyntaxError


def check(code: str) -> None:
    """Return if `code` compiles as IPython would compile it; it may hold magics and await.

    Raises:
        CellSyntaxError: It does not; the text shows the line and the place.
    """
    from IPython.core.inputtransformer2 import TransformerManager

    try:
        with warnings.catch_warnings():
            # The ranks will warn (an invalid escape, say); once is enough.
            warnings.simplefilter("ignore")
            transformed = TransformerManager().transform_cell(code)
            flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            compile(transformed, "<cell>", "exec", flags=flags, dont_inherit=True)
    except SyntaxError as error:
        raise CellSyntaxError(describe(error)) from None


def describe(error: SyntaxError) -> str:
    """Return a syntax error as Python shows it: where, the line, a caret, what is wrong."""
    lines = [f"{error.msg}, line {error.lineno}; the cell was not run."]
    if error.text:
        text = error.text.rstrip("\n")
        shift = len(text) - len(text.lstrip())
        lines.append(f"    {text.lstrip()}")
        if error.offset:
            lines.append("    " + " " * (error.offset - 1 - shift) + "^")
    return "\n".join(lines)
