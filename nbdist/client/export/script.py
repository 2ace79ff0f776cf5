"""Write the script that torchrun runs: a header, a few lines that make a rank, the cells. Pure."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from nbdist.client.export import code as code_of
from nbdist.client.export.blocks import Block, doubtful, not_given, ranks_needed
from nbdist.client.export.environment_lost import variables_lost
from nbdist.client.export.group_made import ended_early, for_modules, taken_as_done
from nbdist.client.export.resolve import Resolved
from nbdist.client.export.settings_lost import settings_lost, started_anew
from nbdist.formatting import counted

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
    """

    n: int
    device: str
    nodes: int = 1
    backend: str = ""
    threads: int | None = None
    timeout: float | None = None


@dataclass(frozen=True, slots=True)
class Script:
    """A script, and what is to be said of it.

    Attributes:
        name: Its file's.
        text: What is in the file.
        options: What it is started with.
        cells: Numbers of the cells that are in it.
        left_out: Cells that are not, each with its reason.
        without: Cells with lines that the script does without, such as those of IPython.
        repeated: Cells that have run more than once in the notebook, and how often.
        not_given: Cells that take names which nothing in the script gives.
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
    repeated: tuple[tuple[int, int], ...]
    not_given: tuple[tuple[int, tuple[str, ...]], ...]
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
        if nodes == 1:
            return f"torchrun --nproc-per-node {n} {quoted}"
        meeting = f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29400"
        return f"torchrun {meeting} --nproc-per-node {n // nodes} {quoted}"


def write(
    resolved: Resolved,
    options: ScriptOptions,
    name: str,
    notebook: str,
    modules: Mapping[str, str],
    doubts: Sequence[str] = (),
) -> Script:
    """Return the script.

    Args:
        resolved: The cells.
        options: What it is started with.
        name: Of its file.
        notebook: Of the notebook, for the header; "" where it is not known.
        modules: Files that it needs beside it, and what is in those of Python; see `beside`.
        doubts: More of them, of what only files tell.
    """
    blocks = [block for block in resolved.blocks if block.code]
    texts = (resolved.code, *modules.values())
    needs_nbdist = any(map(code_of.uses_nbdist, texts))
    left_out = [b for b in resolved.blocks if not b.code]
    cells = tuple(dict.fromkeys(block.number for block in blocks))
    script = Script(
        name,
        "",
        options,
        cells,
        tuple((b.number, b.reason) for b in left_out if not b.is_notebooks),
        tuple((b.number, b.without) for b in blocks if b.without),
        tuple({b.number: b.runs for b in blocks if b.runs > 1 and not b.pushes}.items()),
        tuple((number, tuple(names)) for number, names in not_given(blocks).items()),
        (*_doubts(resolved, modules), *doubts),
        tuple(modules),
        needs_nbdist,
    )
    prelude = _with_nbdist if needs_nbdist else _with_torch
    parts = [
        _header(script, notebook, [b for b in left_out if b.is_notebooks]),
        *_features(resolved.features),
        prelude(options, [word for text in texts for word in code_of.layouts(text)]),
        *([] if needs_nbdist else for_modules(modules)),
        *_refusal(blocks, name),
        *(
            [f"{resolved.rank} = rank  # which a cell takes for something else\n"]
            if resolved.rank != "rank"
            else []
        ),
        *(_part(b if needs_nbdist else _in_a_group(b, resolved)) for b in resolved.blocks),
        _END if needs_nbdist else _END_OF_TORCH,
    ]
    text = "\n\n".join(part for part in parts if part)
    compile(text, name, "exec", dont_inherit=True)
    return replace(script, text=text)


def _doubts(resolved: Resolved, modules: Mapping[str, str]) -> list[str]:
    """Return in sentences what may be other than in the notebook."""
    texts = (resolved.code, *modules.values())
    return [
        *doubtful(resolved.blocks),
        *resolved.doubts,
        *settings_lost(resolved.blocks),
        *ended_early(resolved.blocks, modules),
        *started_anew(resolved.commands, resolved.blocks),
        *variables_lost(resolved.variables, resolved.commands, texts),
        *_rewritten(resolved, modules),
    ]


def _rewritten(resolved: Resolved, modules: Mapping[str, str]) -> list[str]:
    return [
        f"{name} was written more than once: the script imports it as it is now."
        for name in modules
        if name in resolved.rewritten
    ]


def _features(names: Sequence[str]) -> list[str]:
    return [f"from __future__ import {', '.join(sorted(set(names)))}\n"] if names else []


def _header(script: Script, notebook: str, own: Sequence[Block]) -> str:
    of = f"cells of {notebook}" if notebook else "cells of a notebook"
    where = "one machine" if script.options.nodes == 1 else f"{script.options.nodes} machines"
    lines = [
        f"The {of}, as a script.",
        f"On {counted(script.options.n, 'rank')} of {where}, as in the notebook:",
        "",
        f"    {script.command}",
    ]
    if script.modules:
        lines += ["", f"It needs beside it: {', '.join(script.modules)}."]
    if script.left_out:
        lines += ["", "Left out:"]
        lines += [f"    cell {number}: it {reason}" for number, reason in script.left_out]
    if script.doubts:
        lines += ["", "What may be other than in the notebook:"]
        lines += [f"    {doubt}" for doubt in script.doubts]
    if own:
        numbers = ", ".join(str(block.number) for block in own)
        lines += ["", f"The notebook's own cells, which are not for ranks: {numbers}."]
    body = "\n".join(lines).replace("\\", "\\\\").replace('"""', "'''")
    return f'"""{body}\n"""'


def _with_nbdist(options: ScriptOptions, layouts: Sequence[str]) -> str:
    words: list[str] = []
    if layouts:
        words.append(f"layouts={list(dict.fromkeys(layouts))!r}".replace("'", '"'))
    words.append(f'device="{options.device}"')
    if options.backend:
        words.append(f'backend="{options.backend}"')
    if options.threads is not None:
        words.append(f"threads={options.threads}")
    if options.timeout is not None:
        words.append(f"timeout={options.timeout:g}")
    call = f"rank, local_rank, world_size, device = nbdist.init({', '.join(words)})"
    if len(call) > 100:
        inner = "".join(f"    {word},\n" for word in words)
        call = f"rank, local_rank, world_size, device = nbdist.init(\n{inner})"
    return f"import nbdist\nimport torch\nimport torch.distributed as dist\n\n{call}\n"


def _with_torch(options: ScriptOptions, layouts: Sequence[str]) -> str:
    timeout = options.timeout is not None
    is_cuda = options.device == "cuda"
    backend = options.backend or ("cpu:gloo,cuda:nccl" if is_cuda else "gloo")
    device = 'torch.device("cuda", local_rank % torch.cuda.device_count())'
    lines = ["import os", *(["from datetime import timedelta"] if timeout else []), ""]
    lines += ["import torch", "import torch.distributed as dist", ""]
    lines += [
        'if __name__ == "__mp_main__":  # spawned by the script: a rank twice',
        '    raise SystemExit("Start workers by fork, or train below a check of __name__.")',
        "",
    ]
    lines += ['local_rank = int(os.environ["LOCAL_RANK"])']
    lines += [f"device = {device}" if is_cuda else 'device = torch.device("cpu")']
    lines += ["torch.cuda.set_device(device)"] if is_cuda else []
    more = f", timeout=timedelta(seconds={options.timeout:g})" if timeout else ""
    lines += [f'dist.init_process_group("{backend}"{more})']
    lines += ["rank, world_size = dist.get_rank(), dist.get_world_size()"]
    if options.threads is None:
        lines += [
            "# As the notebook's ranks: cores shared out, and random numbers of each rank's own.",
            'local_world_size = int(os.environ["LOCAL_WORLD_SIZE"])',
            'has_affinity = hasattr(os, "sched_getaffinity")',
            "cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count()",
            "torch.set_num_threads(max(1, cores // local_world_size))",
        ]
    else:
        lines += [
            "# As the notebook's ranks: threads, and random numbers of each rank's own.",
            f"torch.set_num_threads({options.threads})",
        ]
    lines += ["torch.seed()"]
    return "\n".join(lines) + "\n"


def _refusal(blocks: Sequence[Block], name: str) -> list[str]:
    """Return the lines that refuse a number of ranks which the cells cannot have."""
    least, why = ranks_needed(blocks)
    if least == 1:
        return []
    told = f"{name} needs {least} ranks or more: {why}."
    told = repr(told) if {'"', "\\"} & {*name} else f'"{told}"'
    lines = [
        f"if world_size < {least}:",
        "    if rank == 0:",
        f"        print({told}, flush=True)",
        "    dist.barrier()  # torchrun ends all at the first that fails",
        "    raise SystemExit(1)",
    ]
    return ["\n".join(lines) + "\n"]


def _in_a_group(block: Block, resolved: Resolved) -> Block:
    return replace(block, code=taken_as_done(block.code, resolved.code))


def _part(block: Block) -> str:
    if block.is_notebooks:
        return ""
    if not block.code:
        return f"# Cell {block.number} is left out: it {block.reason}.\n"
    heading = ": ".join(filter(None, [f"Cell {block.number}", block.heading]))
    comment = "".join(f"# {line}\n" for line in heading.split("\n"))
    return f"{comment}{block.code.rstrip()}\n"
