"""The files that a script needs beside it: what cells have written, and modules in its folder."""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath

_OURS = {"nbdist", "torch"}  # which lie in the folder only where somebody develops them
_PUTS = {"sys.path.insert", "sys.path.append", "sys.path.extend"}


def beside(code: str, written: Mapping[str, str], folder: Path | None) -> dict[str, str]:
    """Return the files that code needs beside it, and what is in them where that is Python.

    Args:
        code: The script's.
        written: What `%%writefile` cells have written, by the files' names.
        folder: Where modules are looked for that code, or another of them, imports; None for
            nowhere.
    """
    found: dict[str, str] = {}
    waiting = [code]
    for text in waiting:
        more = _written(text, written) | (_imported(text, folder) if folder else {})
        waiting += [inside for name, inside in more.items() if name not in found]
        found |= {name: inside for name, inside in more.items() if name not in found}
    return found


def _written(code: str, written: Mapping[str, str]) -> dict[str, str]:
    """Return what cells have written and code names, a module or a file that it reads."""
    return {
        PurePath(name).as_posix(): text if name.endswith(".py") and _parsed(text) else ""
        for name, text in written.items()
        if PurePath(name).stem in code
    }


def _imported(code: str, folder: Path) -> dict[str, str]:
    names = set(imports(code)) - _OURS
    found = [folder / f"{name}.py" for name in names]
    for name in names:
        if (folder / name / "__init__.py").is_file():
            found += (folder / name).rglob("*.py")
    texts = {
        path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8", errors="replace")
        for path in sorted(found)
        if path.is_file()
    }
    return {name: text if _parsed(text) else "" for name, text in texts.items()}


def other_folders(code: str, folder: Path) -> list[str]:
    """Return in sentences which folders code puts on `sys.path`, and what it imports from there.

    Args:
        code: The script's.
        folder: Where they are looked for; others than those written down below it are not known.
    """
    tree = _parsed(code) or ast.Module([], [])
    texts = [
        node.value.rstrip("/")
        for put in ast.walk(tree)
        if isinstance(put, ast.Call) and ast.unparse(put.func) in _PUTS
        for node in ast.walk(put)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    names = sorted(set(imports(code)) - _OURS)
    found = {
        text: [name for name in names if _lies_in(folder / text, name)]
        for text in dict.fromkeys(texts)
        if not PurePath(text).is_absolute() and PurePath(text).parts
    }
    return [
        f"It imports {', '.join(of)} from {text}/, which a cell puts on sys.path: {text}/ must lie"
        " beside the script, and travel with it."
        for text, of in found.items()
        if of
    ]


def _lies_in(folder: Path, name: str) -> bool:
    return (folder / f"{name}.py").is_file() or (folder / name / "__init__.py").is_file()


def _parsed(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return None


def imports(code: str) -> Iterator[str]:
    """Yield the top-level packages that code imports; what is no Python imports none."""
    for node in ast.walk(_parsed(code) or ast.Module([], [])):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module.partition(".")[0]
