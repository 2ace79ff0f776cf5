"""Write the script that torchrun runs: a header, a few lines that make a rank, the cells. Pure.

`%%distributed` cells stand there verbatim, in order. What stays out is a comment at its place, with
its reason: a script is to be read and kept.
"""

import ast
import builtins
import re
import shlex
import symtable
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pyflakes.checker import Builtin, Checker
from pyflakes.messages import UndefinedName

from nbdist.client.export.cells import NotebookCell
from nbdist.client.export.parts import RANK, Part, name_cells
from nbdist.client.export.plain_code import commented
from nbdist.shared.options import HASH_SEED
from nbdist.shared.text import counted

_GIVEN_BY_IPYTHON = {"display": "from IPython.display import display"}
_TAKEN_AS_DONE = """\
# As in the notebook: what makes the process group once more is taken as done.
def taken_as_done(make_group):
    return lambda *args, **more: torch.distributed.is_initialized() or make_group(*args, **more)


torch.distributed.init_process_group = taken_as_done(torch.distributed.init_process_group)
"""
# Imported once more: a cell may have given the name to something else, or have ended the group.
_END = """\
import torch.distributed as dist

if dist.is_initialized():
    dist.destroy_process_group()
"""
# What nbdist.init() does at the end of a script that uses it.
_LET_GO = "gloo's thread drops its last collective, for which torch may abort at an exit"
_END_OF_TORCH = f"import time\n\n{_END}time.sleep(0.1)  # {_LET_GO}\n"


@dataclass(frozen=True, slots=True)
class ScriptOptions:
    """What a script is started with.

    Attributes:
        n: Ranks that the notebook had.
        device: cpu or cuda.
        nodes: Machines that the ranks are spread over.
        backend: "" for what the device calls for.
        threads: CPU threads a rank; None for the cores divided by the ranks.
        timeout: Of a collective, in seconds; None for torch's own.
        virtual: What the notebook's ranks stand for; "" where they stand for nothing. Only
            `%dist scaling` starts a script's ranks as such.
    """

    n: int
    device: str
    nodes: int = 1
    backend: str = ""
    threads: int | None = None
    timeout: float | None = None
    virtual: str = ""


@dataclass(frozen=True, slots=True)
class Script:
    """A script, and what is to be said of it.

    Attributes:
        name: Its file's.
        text: What is in the file.
        options: What it is started with.
        cells: Numbers of the cells that are in it.
        left_out: Cells that are not, each with its reason.
        without: Cells with lines that were commented out.
        doubts: What may be other than in the notebook, in sentences.
        modules: Files that it needs beside it, also in folders below.
        needs_nbdist: Whether it imports nbdist, itself or by these files.
    """

    name: str
    text: str
    options: ScriptOptions
    cells: tuple[int, ...]
    left_out: tuple[tuple[int, str], ...]
    without: tuple[tuple[int, tuple[str, ...]], ...]
    doubts: tuple[str, ...]
    modules: tuple[str, ...]
    needs_nbdist: bool

    @property
    def command(self) -> str:
        """What runs it in its folder; of several machines, on each."""
        return self.command_of(self.name)

    def command_of(self, path: str) -> str:
        """Return what runs it where its path is that one, for a shell."""
        nodes, n, quoted = self.options.nodes, self.options.n, shlex.quote(path)
        torchrun = f"PYTHONHASHSEED={HASH_SEED} torchrun"  # else each rank orders sets another way
        if nodes == 1:
            return f"{torchrun} --nproc-per-node {n} {quoted}"
        meeting = f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29400"
        return f"{torchrun} {meeting} --nproc-per-node {n // nodes} {quoted}"

    @property
    def left_out_lines(self) -> list[str]:
        """What stays out, a line a reason: `cells 3, 5: failed`."""
        reasons: dict[str, list[int]] = {}
        for number, reason in self.left_out:
            reasons.setdefault(reason, []).append(number)
        return [f"{name_cells(numbers)}: {reason}" for reason, numbers in reasons.items()]


def write(
    parts: Sequence[Part],
    options: ScriptOptions,
    name: str,
    notebook: str,
    modules: Mapping[str, str],
    doubts: Sequence[str] = (),
    cells: Sequence[NotebookCell] = (),
) -> Script:
    """Return the script.

    Args:
        parts: What the cells come to.
        options: What it is started with.
        name: Of its file.
        notebook: Of the notebook, for the header; "" where it is not known.
        modules: Files that it needs beside it, and what is in them; see `beside`.
        doubts: More of them, of what the runs of cells tell.
        cells: All of the notebook's, which may have names that the script lacks.
    """
    kept = [part for part in parts if part.code]
    texts = (*(part.code for part in kept), *modules.values())
    script = Script(
        name,
        "",
        options,
        tuple(dict.fromkeys(part.number for part in kept)),
        tuple((part.number, part.reason) for part in parts if part.reason),
        tuple((part.number, part.without) for part in kept if part.without),
        (*doubts, *_clashes(kept), *_early_features(kept)),
        tuple(modules),
        any(map(_uses_nbdist, texts)),
    )
    prelude = _with_nbdist(options) if script.needs_nbdist else _with_torch(options, texts)
    end = _END if script.needs_nbdist else _END_OF_TORCH
    guard = [f"{RANK} = rank\n"] if any(f"if {RANK} " in part.code for part in kept) else []
    bodies = [prelude, *_refusal(kept, name), *guard, *map(_text_of, parts), end]
    features = sorted({feature for part in kept for feature in part.features})
    # pyflakes counts lines: the header is written when what it says is known.
    begin = [f"from __future__ import {', '.join(features)}\n"] if features else []
    lacking = undefined(_joined([*begin, *bodies]))
    begin += [_GIVEN_BY_IPYTHON[one] + "\n" for one in _GIVEN_BY_IPYTHON if one in lacking]
    script = replace(script, doubts=(*script.doubts, *_not_given(kept, cells, lacking)))
    text = _joined([_header(script, notebook), *begin, *bodies])
    compile(text, name, "exec", dont_inherit=True)
    return replace(script, text=text)


def _joined(bodies: Sequence[str]) -> str:
    return "\n\n".join(bodies)


def _clashes(parts: Sequence[Part]) -> list[str]:
    """Return in sentences which names functions that were sent share with cells of the ranks.

    In the notebook a function keeps its own globals. A script has one of each name.
    """
    said = []
    for part in parts:
        for name, code in part.brings.items():
            others = [
                one
                for one in parts
                if one is not part and name in bound(one.code) and code not in one.code.split("\n")
            ]
            apart = [one.number for one in others if one.brings.get(name, "") != code]
            if apart:
                said.append(
                    f"A function that cell {part.number} sends reads {name}, of the notebook, and "
                    f"{name_cells(apart)} set {name}, too: in the script these are one."
                )
    return said


def bound(code: str) -> set[str]:
    """Return the names that code gives at its top level."""
    table = symtable.symtable(code, "cell", "exec")
    return {
        symbol.get_name()
        for symbol in table.get_symbols()
        if symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()
    }


def undefined(text: str) -> dict[str, int]:
    """Return the names that nothing in a script gives, each with the first line that uses it."""
    found: dict[str, int] = {}
    for message in _ScriptChecker(ast.parse(text)).messages:
        if isinstance(message, UndefinedName):
            found.setdefault(message.message_args[0], message.lineno)
    return found


class _ScriptChecker(Checker):  # type: ignore[misc]
    """pyflakes, to which what IPython has added to this kernel's builtins is no builtin."""

    def addBinding(self, node: ast.AST | None, value: Any) -> None:
        """Note a name that is given, by the script or by Python."""
        if not isinstance(value, Builtin) or _is_of_python(getattr(builtins, value.name, None)):
            super().addBinding(node, value)


def _is_of_python(value: object) -> bool:
    module = getattr(value, "__module__", None) or "builtins"
    return str(module).partition(".")[0] in sys.stdlib_module_names


def _early_features(parts: Sequence[Part]) -> list[str]:
    """Return in a sentence that a `from __future__` holds for cells above it, too."""
    at = next((n for n, part in enumerate(parts) if part.features), 0)
    if not at:
        return []
    features = ", ".join(parts[at].features)
    return [
        (
            f"from __future__ import {features} of cell {parts[at].number} holds for the whole"
            " script, and in the notebook for the cells below it."
        )
    ]


def _not_given(
    kept: Sequence[Part], cells: Sequence[NotebookCell], lacking: Mapping[str, int]
) -> list[str]:
    """Return in sentences which names no cell of the script gives, and which other cells have."""
    lines: dict[tuple[str, str], list[str]] = {}
    there = {part.number for part in kept}
    for name in sorted(lacking.keys() - _GIVEN_BY_IPYTHON.keys()):
        word = re.compile(rf"\b{re.escape(name)}\b")
        using = dict.fromkeys(part.number for part in kept if word.search(part.code))
        giving = [
            cell.number for cell in cells if cell.number not in there and word.search(cell.source)
        ]
        where = f"; {name_cells(giving)} may, and is not in it" if giving else ""
        lines.setdefault((name_cells(list(using)) if using else "a cell", where), []).append(name)
    return [
        f"Nothing in the script gives {', '.join(names)}, which {using} "
        f"{'use' if using.startswith('cells') else 'uses'}{where}."
        for (using, where), names in lines.items()
    ]


def _uses_nbdist(code: str) -> bool:
    """Return whether code names nbdist."""
    try:
        nodes = list(ast.walk(ast.parse(code)))
    except (SyntaxError, ValueError):
        return False
    return any(
        (isinstance(node, ast.Name) and node.id == "nbdist")
        or (isinstance(node, ast.Import) and any(a.name == "nbdist" for a in node.names))
        or (isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "nbdist")
        for node in nodes
    )


def _header(script: Script, notebook: str) -> str:
    of = f"cells of {notebook}" if notebook else "cells of a notebook"
    where = "one machine" if script.options.nodes == 1 else f"{script.options.nodes} machines"
    lines = [
        f"The {of}, as a script.",
        f"On {counted(script.options.n, 'rank')} of {where}:",
        "",
        f"    {script.command}",
    ]
    if script.modules:
        lines += ["", f"It needs beside it: {', '.join(script.modules)}."]
    if script.left_out:
        lines += ["", "Left out:", *(f"    {line}" for line in script.left_out_lines)]
    if script.doubts:
        lines += ["", "What may be other than in the notebook:"]
        lines += [f"    {doubt}" for doubt in script.doubts]
    body = "\n".join(lines).replace("\\", "\\\\").replace('"""', "'''")
    return f'"""{body}\n"""'


def _with_nbdist(options: ScriptOptions) -> str:
    words = [f'device="{options.device}"']
    if options.backend:
        words.append(f'backend="{options.backend}"')
    if options.threads is not None:
        words.append(f"threads={options.threads}")
    if options.timeout is not None:
        words.append(f"timeout={options.timeout:g}")
    call = f"rank, local_rank, world_size, device = nbdist.init({', '.join(words)})"
    return f"import nbdist\nimport torch\nimport torch.distributed as dist\n\n{call}\n"


def _with_torch(options: ScriptOptions, texts: Sequence[str]) -> str:
    is_cuda = options.device == "cuda"
    backend = options.backend or ("cpu:gloo,cuda:nccl" if is_cuda else "gloo")
    device = 'torch.device("cuda", local_rank % torch.cuda.device_count())'
    more = f", timeout=timedelta(seconds={options.timeout:g})" if options.timeout else ""
    threads = [f"torch.set_num_threads({options.threads})"]
    if options.threads is None:
        threads = [
            'local_world_size = int(os.environ["LOCAL_WORLD_SIZE"])',
            'has_affinity = hasattr(os, "sched_getaffinity")',
            "cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count()",
            "torch.set_num_threads(max(1, cores // local_world_size))",
        ]
    lines = [
        "import os",
        *(["from datetime import timedelta"] if options.timeout else []),
        "",
        "import torch",
        "import torch.distributed as dist",
        "",
        'if __name__ == "__mp_main__":  # spawned by the script: a rank twice',
        '    raise SystemExit("Start workers by fork, or train below a check of __name__.")',
        "",
        'local_rank = int(os.environ["LOCAL_RANK"])',
        f"device = {device}" if is_cuda else 'device = torch.device("cpu")',
        *(["torch.cuda.set_device(device)"] if is_cuda else []),
        f'dist.init_process_group("{backend}"{more})',
        "rank, world_size = dist.get_rank(), dist.get_world_size()",
        "# As the notebook's ranks: threads, and random numbers of each rank's own.",
        *threads,
        "torch.seed()",
    ]
    is_made_again = any("init_process_group" in text for text in texts)
    return "\n".join(lines) + "\n" + (f"\n\n{_TAKEN_AS_DONE}" if is_made_again else "")


def _refusal(parts: Sequence[Part], name: str) -> list[str]:
    """Return the lines that refuse a number of ranks which the cells cannot have."""
    most = max(parts, key=lambda part: part.least_ranks, default=None)
    if most is None or most.least_ranks == 1:
        return []
    why = f"cell {most.number} runs on rank {most.least_ranks - 1}"
    refusal = f"{name} needs {most.least_ranks} ranks or more: {why}."
    return [f"if world_size < {most.least_ranks}:\n    raise SystemExit({refusal!r})\n"]


def _text_of(part: Part) -> str:
    if not part.code:
        left = f"# Cell {part.number} is left out: it {part.reason}."
        return f"{left}\n{commented(part.source)}\n" if part.source else f"{left}\n"
    first, *notes = part.heading.split("\n")
    heading = ": ".join(filter(None, [f"Cell {part.number}", first]))
    return f"{commented(chr(10).join([heading, *notes]))}\n{part.code.rstrip()}\n"
