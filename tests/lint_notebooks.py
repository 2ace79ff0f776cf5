"""Lint the Python in the cells of notebooks: `python tests/lint_notebooks.py FILE_OR_FOLDER...`.

Ruff reads notebooks by itself, but skips cells with magics of others. A notebook of ours holds
two programs: the cells of the kernel, and those under `%%distributed`, which run on the ranks
with names of their own. Each is given to ruff as a notebook in which the other's cells are empty,
so that ruff's cell and line numbers are those of the file.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAGIC = "%%distributed"
# What a rank finds in its namespace before the first cell.
RANK_NAMES = ("rank", "local_rank", "world_size", "device", "torch", "dist", "nbdist")

# E402: a cell imports where it needs to. B018: its last line may be a value to show.
RULES = ("--select", "E,F,W,I,B,UP,SIM,C4,PIE", "--ignore", "E402,B018")


@dataclass(frozen=True, slots=True)
class Finding:
    """One complaint; `cell` and `line` count from 1, `cell` over code cells only."""

    path: Path
    cell: int
    line: int
    code: str
    message: str

    def __str__(self) -> str:
        """Return the line that is printed."""
        return f"{self.path}: cell {self.cell}, line {self.line}: {self.code} {self.message}"


def split(sources: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the cells of the kernel and those of the ranks, each with the other's left empty.

    A cell for the ranks keeps its line numbers: its first line, the magic, becomes a comment.
    Cells under any other cell magic hold another language, or nothing that can be known here.
    """
    kernel, ranks = [], []
    for source in sources:
        magic, _, body = source.partition("\n")
        is_distributed = magic.split(maxsplit=1)[:1] == [MAGIC]
        ranks.append(f"#\n{body}" if is_distributed else "")
        kernel.append("" if source.startswith("%%") else source)
    return kernel, ranks


def names_from_magics(sources: Sequence[str]) -> tuple[set[str], set[str]]:
    """Return the names that magics bring into the kernel (pull) and to the ranks (push, -p)."""
    pulled: set[str] = set()
    pushed: set[str] = set()
    for source in sources:
        for kind, names in re.findall(r"^\s*%dist +(push|pull) +(.+)$", source, re.MULTILINE):
            words = names.split(" -r")[0].replace(",", " ").split()
            (pushed if kind == "push" else pulled).update(w for w in words if w.isidentifier())
        if source.startswith(MAGIC):
            pushed.update(re.findall(r"\s-p +(\w+)=", source.partition("\n")[0]))
    return pulled, pushed


def run_ruff(path: Path, cells: Sequence[str], known: Sequence[str]) -> list[Finding]:
    """Return what ruff says of a notebook of these code cells, in which `known` names exist."""
    notebook = {
        "nbformat": 4,
        "nbformat_minor": 5,
        "metadata": {"language_info": {"name": "python"}},
        "cells": [
            {"cell_type": "code", "id": f"c{i}", "metadata": {}, "outputs": [], "source": source}
            | {"execution_count": None}
            for i, source in enumerate(cells)
        ],
    }
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--quiet"]
    command += ["--output-format=json", "--stdin-filename", path.name, *RULES]
    command += ["--target-version=py311", "--line-length=100", f"--config=builtins={list(known)}"]
    done = subprocess.run(
        [*command, "-"],
        input=json.dumps(notebook),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode not in (0, 1):
        raise RuntimeError(f"ruff could not read {path}: {done.stderr.strip()}")
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return [
        Finding(path, r["cell"], r["location"]["row"], r["code"] or "E999", r["message"])
        for r in rows
    ]


def lint(path: Path) -> list[Finding]:
    """Return every finding in the notebook at `path`, in the order of its cells."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    sources = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    kernel, ranks = split(sources)
    pulled, pushed = names_from_magics(sources)
    found = run_ruff(path, kernel, sorted(pulled))
    found += run_ruff(path, ranks, sorted({*RANK_NAMES, *pushed}))
    return sorted(found, key=lambda finding: (finding.cell, finding.line))


def main(arguments: Sequence[str]) -> int:
    """Print the findings; return 1 if there are any."""
    parser = argparse.ArgumentParser(description="Lint the cells of notebooks, for both programs.")
    parser.add_argument("paths", nargs="+", type=Path, metavar="FILE_OR_FOLDER")
    paths: list[Path] = parser.parse_args(arguments).paths
    notebooks: list[Path] = []
    for path in paths:
        notebooks += sorted(path.glob("*.ipynb")) if path.is_dir() else [path]
    findings = [finding for notebook in notebooks for finding in lint(notebook)]
    for finding in findings:
        print(finding)
    print(f"{len(notebooks)} notebooks: {len(findings) or 'no'} findings")
    return bool(findings)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
