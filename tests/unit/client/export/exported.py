"""What cells come to, for tests that are about their sources alone."""

from textwrap import dedent

from nbdist.client.export.modules import beside
from nbdist.client.export.notebook_cells import NotebookCell
from nbdist.client.export.resolve import Resolved, resolve
from nbdist.client.export.script import Script, ScriptOptions, write
from nbdist.client.notebook.arguments import parse_dist, parse_distributed


def cells(*sources: str, failed: tuple[int, ...] = ()) -> list[NotebookCell]:
    return [
        NotebookCell(number, dedent(source).strip("\n"), number in failed)
        for number, source in enumerate(sources, 1)
    ]


def resolved(
    *sources: str, failed: tuple[int, ...] = (), chosen: tuple[int, ...] | None = None
) -> Resolved:
    return resolve(cells(*sources, failed=failed), chosen, parse_dist, parse_distributed)


def code(*sources: str) -> str:
    return "\n".join(block.code for block in resolved(*sources).blocks if block.code)


def reasons(*sources: str, failed: tuple[int, ...] = ()) -> dict[int, str]:
    found = resolved(*sources, failed=failed).blocks
    return {one.number: one.reason for one in found if one.reason and not one.is_notebooks}


def script(*sources: str, n: int = 2, failed: tuple[int, ...] = ()) -> Script:
    found = resolved(*sources, failed=failed)
    modules = beside(found.code, found.written, None)
    return write(found, ScriptOptions(n, "cpu"), "train.py", "a.ipynb", modules)
