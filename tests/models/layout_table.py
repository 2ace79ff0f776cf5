"""Which layouts the library's models are proven under, and the table of it. Pure: no torch.

Made anew by `NBDIST_WRITE_LAYOUT_TABLE=1 python -m pytest -m "" tests/models/test_layouts.py`.
"""

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

FILE = Path(__file__).with_suffix(".md")
_WORDS: Final = ("ddp", "zero1", "zero2", "zero3")
LAYOUTS: Final = (*_WORDS, "tp=2", "pp=2", "cp=2", "ep=2", "fsdp=2 tp=2", "pp=2 tp=2")
# What `make test` proves of it; the rest is of `make test-all`.
EVERY_TIME: Final = (
    ("gpt2", "tp=2"),
    ("gpt2", "pp=2"),
    ("mixtral", "pp=2"),
    ("mixtral", "cp=2"),
    ("mixtral", "ep=2"),
    ("t5", "ddp"),
    ("t5", "cp=2"),
    ("vit", "pp=2 tp=2"),
)
PROVEN: Final = ("bit-equal", "noise floor")
_HEAD = """# The library's models under every layout

One step under each layout on two or four ranks, against one process on the same parts of the batch
(`layout.verify`). Inputs are found; where they are not, the model is given an `example=`.

- **bit-equal**, **noise floor**: every gradient, buffer and loss is as in one process, to the bit
  or within the round-off that is measured beside it.
- **refused**: `parallelize`, or the proof, says in words why it cannot be; the words follow.

Made by `test_layouts.py`, which compares each run with this file, on torch {torch}, gloo, CPUs.

"""


def ranks_of(layout: str) -> int:
    """Return on how many ranks a layout is tried: on two if it does not say."""
    return math.prod(int(size) for size in re.findall(r"=(\d+)", layout)) if "=" in layout else 2


def written(cells: Mapping[tuple[str, str], str], torch: str) -> str:
    """Return the table as text."""
    models = dict.fromkeys(model for model, _ in cells)
    lines = [f"| model | {' | '.join(LAYOUTS)} |", f"| --- |{' --- |' * len(LAYOUTS)}"]
    reasons: dict[str, list[str]] = {}
    for model in models:
        row = [cells.get((model, layout), "-") for layout in LAYOUTS]
        for layout, cell in zip(LAYOUTS, row, strict=True):
            if cell.startswith("refused: "):
                reasons.setdefault(cell.removeprefix("refused: "), []).append(f"{model} {layout}")
        short = [cell.partition(":")[0] for cell in row]
        lines.append(f"| {model} | {' | '.join(short)} |")
    lines += ["", "| refused, in words | cells |", "| --- | --- |"]
    lines += [f"| {words} | {', '.join(where)} |" for words, where in sorted(reasons.items())]
    return _HEAD.format(torch=torch) + "\n".join(lines) + "\n"


def read(text: str) -> dict[tuple[str, str], str]:
    """Return the cells of a table, without the words of refusals."""
    rows = re.findall(r"^\| (.+) \|$", text, re.MULTILINE)
    found: dict[tuple[str, str], str] = {}
    for row in rows:
        model, *cells = row.split(" | ")
        if len(cells) == len(LAYOUTS) and model != "model" and not model.startswith("---"):
            found |= {(model, lay): cell for lay, cell in zip(LAYOUTS, cells, strict=True)}
    return found


def differences(
    found: Mapping[tuple[str, str], str], table: Mapping[tuple[str, str], str]
) -> Iterable[str]:
    """Yield what is no longer as the table says; round-off may happen to be nothing."""
    for key, cell in found.items():
        now, then = (re.split("[:,]", one)[0] for one in (cell, table.get(key, "-")))
        if now != then and not {now, then} <= set(PROVEN):
            yield f"{' '.join(key)} is {cell}, and was {then}"
