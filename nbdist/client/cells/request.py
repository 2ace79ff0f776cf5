"""A cell as it was asked for, checked for its syntax, and one attempt to run it."""

import ast
import contextlib
import os
import shlex
import sys
import time
import tokenize
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from nbdist.client.faults.advice import WhatRan
from nbdist.client.metrics.profile.chosen import ChosenSteps
from nbdist.client.output.slots import Display
from nbdist.shared import plain
from nbdist.shared.errors import CellSyntaxError, UsageError
from nbdist.shared.wire import CellStart, CheckpointEvery, ProfileSteps, Repeat, Script


@dataclass(frozen=True, slots=True)
class CellRequest:
    """A cell, with all that a person or a script has asked of it; see `Session.run`.

    Attributes:
        code: Its source.
        ranks: Where it runs, ascending.
        timeout_s: Bounds the whole cell, in seconds; None lets it run for ever.
        params: Set on the ranks before the cell runs, and logged.
        run_name: Name of its MLflow run.
        resume: Continue the newest run of that name.
        track: Whether a training is tracked.
        show: Whether the notebook shows it.
        prompt: The number that tracebacks give it; None takes the session's count of cells.
        profile: Steps to record.
        call: A row of `CELLS` in `engine/kernel/ipython/calls.py`, to run instead of `code`.
        arguments: Of that call.
        study: The key under which its run is nested; of a sweep, as what follows.
        heading: A line above it.
        above: What the notebook's cell shows already.
        checkpoints: The folder of checkpoints that a cell gives no name.
        every: Steps between checkpoints that ranks save by themselves; 0 for none.
        asked_at: When, in seconds since 1970: older checkpoints are not this cell's.
        is_changed: Whether it continues the cell that failed last with other code.
        script: The file that `code` is all of; "" for a cell.
        module: The module that the file is, where it was called by that, such as `pkg.__main__`.
        argv: The words after it.
        evidence: The folder of folders in which ranks keep what steps were called with; "" where
            that stays in their memory, of those that are left out alone.
        ignore: Rules that say nothing of it.
    """

    code: str
    ranks: tuple[int, ...]
    timeout_s: float | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    run_name: str | None = None
    resume: bool = False
    track: bool = True
    show: bool = False
    prompt: int | None = None
    profile: ChosenSteps | None = None
    call: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    study: str | None = None
    heading: str = ""
    above: tuple[Display, ...] = ()
    checkpoints: str = ""
    every: int = 0
    asked_at: float = field(default_factory=time.time)
    is_changed: bool = False
    guard: bool = False
    evidence: str = ""
    script: str = ""
    module: str = ""
    argv: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()

    @property
    def ran(self) -> WhatRan:
        """How messages name it."""
        module = self.module.removesuffix(".__main__")
        script = _from_here(self.script) if self.script else ""
        return WhatRan(script, words=self.argv, module=module)

    @property
    def runs_again(self) -> str:
        """Which cell runs again, for who may think of another one."""
        if self.script:
            return f"Running {self.ran.name} again."
        lines = (line.strip() for line in self.code.splitlines())
        first = next((line for line in lines if line and not line.startswith("#")), "")
        return f"Running cell {self.prompt} again: {first}"


@dataclass(frozen=True, slots=True)
class CellAttempt:
    """One run of a request, and what each rank gets to know of it."""

    request: CellRequest
    start: CellStart

    @classmethod
    def of(
        cls,
        request: CellRequest,
        number: int,
        *,
        prompt: int,
        failed: int | None,
        repeat: Repeat,
        profile: ProfileSteps | None,
        faults: int,
        session_s: float,
        keep: bool,
    ) -> "CellAttempt":
        """Return the attempt that the session numbers so; see `CellStart` and `CheckpointEvery`."""
        every, script = request.every, request.script
        start = CellStart(
            number=number,
            ranks=request.ranks,
            prompt=prompt,
            params={name: plain.encode(value) for name, value in request.params.items()},
            failed=failed,
            repeat=repeat,
            is_changed=request.is_changed,
            profile=profile,
            checkpoints=request.checkpoints,
            saves=CheckpointEvery(every, request.asked_at, faults, session_s) if every else None,
            call=request.call,
            arguments=request.arguments,
            track=request.track,
            script=Script(script, request.module, request.argv) if script else None,
            keep=keep,
            guard=request.guard,
            evidence=request.evidence and _own_folder(request, number),
        )
        return cls(request, start)

    def memory(self) -> dict[str, Any]:
        """Return what `remembered` makes this attempt of, in another kernel: JSON-like."""
        request = {f.name: getattr(self.request, f.name) for f in fields(self.request)}
        chosen = self.request.profile
        request |= {
            "params": self.start.params,
            "profile": None if chosen is None else [chosen.first, chosen.last],
            "above": [],
        }
        return {
            "request": request,
            "start": self.start.to_wire(),
            "began": time.time(),
            "kernel": os.getpid(),
        }


def _own_folder(request: CellRequest, number: int) -> str:
    """Return a folder that no other cell or attempt has, of this kernel or another."""
    at = time.strftime("%Y%m%d-%H%M%S", time.localtime(request.asked_at))
    return os.path.join(request.evidence, f"{at}-{os.getpid()}-{number}")


def remembered(memory: Mapping[str, Any]) -> CellAttempt:
    """Return the attempt whose `memory` another kernel has left."""
    kept = memory["request"]
    chosen = kept["profile"]
    own = {
        "ranks": tuple(kept["ranks"]),
        "params": {k: plain.decode(v) for k, v in kept["params"].items()},
        "profile": None if chosen is None else ChosenSteps(*chosen),
        "above": (),
        "argv": tuple(kept["argv"]),
        "ignore": tuple(kept["ignore"]),
    }
    return CellAttempt(CellRequest(**kept | own), CellStart.from_wire(memory["start"]))


def _from_here(script: str) -> str:
    """Return a path as `%dist run` finds it from the notebook's folder."""
    try:
        here = Path.cwd()
    except FileNotFoundError:  # it was deleted
        return script
    path = Path(script)
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def check_syntax(code: str) -> None:
    """Return if `code` compiles as IPython would compile it; it may hold magics and await.

    Raises:
        CellSyntaxError: It does not; the text shows the line and the place.
        UsageError: It is no text.
    """
    from IPython.core.inputtransformer2 import TransformerManager

    if not isinstance(code, str):
        raise UsageError(f"A cell is a text of Python code, not {code!r}.")
    with warnings.catch_warnings():
        # The ranks will warn (an invalid escape, say); once is enough.
        warnings.simplefilter("ignore")
        with contextlib.suppress(SyntaxError):
            return _compile(code)  # most cells; what IPython would change is no Python
        try:
            _compile(TransformerManager().transform_cell(code))
        except SyntaxError as error:
            raise CellSyntaxError(describe_syntax_error(error)) from None


def find_module(name: str) -> tuple[str, Path]:
    """Return what `python -m name` would run, and its file; nothing is imported for this.

    Raises:
        UsageError: There is no such module of Python code.
    """
    places, found = [os.getcwd(), *sys.path], None
    for end in range(1, name.count(".") + 2):
        full = ".".join(name.split(".")[:end])
        found = PathFinder.find_spec(full, places) if places else None
        places = list(found.submodule_search_locations or ()) if found else []
    if found and places:  # a package
        return find_module(f"{name}.__main__")
    if found is None or not found.has_location or not str(found.origin).endswith(".py"):
        missing = name.removesuffix(".__main__")
        is_package = found is None and missing != name
        raise UsageError(
            f"There is no module {missing}."
            if not is_package
            else f"The package {missing} has no module __main__ that could be run.",
            why=f"as python -m does, it is looked for in {os.getcwd()} and in sys.path.",
            do="%dist run -m PACKAGE.MODULE, in the folder that holds the package",
        )
    return name, Path(str(found.origin)).absolute()


def read_script(file: Path) -> str:
    """Return the source of a script that compiles, as it can be a cell's.

    Raises:
        UsageError: It cannot be read, or is a notebook.
        CellSyntaxError: It does not compile.
    """
    if file.suffix == ".ipynb":
        notebook, script = shlex.quote(file.name), shlex.quote(f"{file.stem}.py")
        raise UsageError(
            f"{file.name} is a notebook, not a script.",
            do=f"nbdist export {notebook} {script} in a terminal, then %dist run {script}",
        )
    try:
        with tokenize.open(file) as opened:
            code = opened.read()
    except OSError as error:
        raise UsageError(f"The script {file} cannot be read: {error.strerror}.") from None
    except (SyntaxError, UnicodeDecodeError) as error:
        raise _not_in_its_encoding(file, str(error)) from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(code, str(file), "exec", dont_inherit=True)
    except SyntaxError as error:
        message = describe_syntax_error(error).replace("the cell", file.name, 1)
        raise CellSyntaxError(message) from None
    except ValueError as error:  # a null byte, before Python 3.12
        raise UsageError(f"The script {file} cannot be read: {error}.") from None
    # IPython drops empty lines above a cell, and all others would have other numbers.
    return f"#{code}" if code[:1].isspace() else code


def _not_in_its_encoding(file: Path, reason: str) -> UsageError:
    """Return the error of a script that cannot be decoded, for `reason`."""
    is_unnamed = "missing encoding" in reason or "'utf-8' codec" in reason
    return UsageError(
        f"The script {file} is not UTF-8."
        if is_unnamed
        else f"The script {file} is not in the encoding that it names: {reason}.",
        why="Python reads a script as UTF-8 where its first two lines name no other encoding"
        if is_unnamed
        else "",
        do="save it as UTF-8, or name its encoding in the first line: # -*- coding: latin-1 -*-",
    )


def _compile(code: str) -> None:
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    compile(code, "<cell>", "exec", flags=flags, dont_inherit=True)


def describe_syntax_error(error: SyntaxError) -> str:
    """Return a syntax error as Python shows it: where, the line, a caret, what is wrong."""
    lines = [f"{error.msg}, line {error.lineno}; the cell was not run."]
    if error.text:
        text = error.text.rstrip("\n")
        shift = len(text) - len(text.lstrip())
        lines.append(f"    {text.lstrip()}")
        if error.offset:
            lines.append("    " + " " * (error.offset - 1 - shift) + "^")
    return "\n".join(lines)
