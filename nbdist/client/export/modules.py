"""The files that a script needs beside it: modules in the notebook's folder."""

import ast
from collections.abc import Iterator
from pathlib import Path

_OURS = {"nbdist", "torch"}  # which lie in the folder only where somebody develops them


def beside(code: str, folder: Path | None) -> dict[str, str]:
    """Return the files that code needs beside it, and what is in them where that is Python.

    Args:
        code: The script's.
        folder: Where modules are looked for that code, or another of them, imports; None for
            nowhere.
    """
    found: dict[str, str] = {}
    waiting = [code] if folder else []
    for text in waiting:
        assert folder is not None
        more = {name: of for name, of in _imported(text, folder).items() if name not in found}
        waiting += more.values()
        found |= more
    return found


def _imported(code: str, folder: Path) -> dict[str, str]:
    names = set(imports(code)) - _OURS
    found = [folder / f"{name}.py" for name in names]
    for name in names:
        if (folder / name / "__init__.py").is_file():
            found += (folder / name).rglob("*.py")
    return {
        path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8", errors="replace")
        for path in sorted(found)
        if path.is_file()
    }


def imports(code: str) -> Iterator[str]:
    """Yield the top-level packages that code imports; what is no Python imports none."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module.partition(".")[0]
