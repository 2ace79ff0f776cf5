"""Write down what the steps of a cell compute, so that two runs can be compared afterwards.

Of some steps (`next_recorded`): what the model was called with, what each of its modules has
returned, the loss, and the optimizer's gradients, weights and options, as sketches
(`checks/sketch`), which no sample can be read out of. A file a rank, a line a step, written as the
step ends: what a rank that dies has written stays.

    .nbdist/numerics/TIME-PID-CELL/      0700; the newest `MOST_FOLDERS` stay
      rank0.jsonl, rank1.jsonl, ...

A step is a call of an optimizer: in a loop with several, each call is one.

Threads: hooks run on the one that trains; all else on the main one. No collectives.
"""

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from nbdist.engine.checks import model_facts
from nbdist.engine.checks.step_numerics import StepNumerics
from nbdist.engine.compat import torch_hooks
from nbdist.engine.compat.cuda_graphs import graphs
from nbdist.engine.component import Component, EndedCell
from nbdist.engine.kernel.cost_clock import clocked
from nbdist.engine.kernel.records import Recorder
from nbdist.engine.steps import guard
from nbdist.engine.steps.kept_step import plain
from nbdist.shared.error_text import named
from nbdist.shared.wire import NUMERICS, CellStart

FORMAT: Final = 1
MOST_FOLDERS: Final = 32
ALL_OF_THE_FIRST: Final = 8  # steps; each later one is a fifth further on
_log = logging.getLogger("nbdist.numerics")


def next_recorded(step: int) -> int:
    """Return the step that is recorded after this one; the same in every run."""
    return step + 1 if step < ALL_OF_THE_FIRST else -(-step * 6 // 5)


class Numerics(Component):
    """Records the steps of a cell that keeps evidence."""

    def __init__(self, recorder: Recorder) -> None:
        """Record nothing, until a cell asks for it."""
        self._recorder = recorder
        self._file: Path | None = None
        self._failed = ""
        self._undo: list[torch_hooks.Undo] = []
        self._steps = 0  # that are over
        self._next = 1
        self._step: StepNumerics | None = None
        self._within: ref[Optimizer] | None = None  # another within its call is part of it

    def cell_began(self, start: CellStart) -> None:
        """Record if the cell keeps evidence."""
        self._uninstall()
        self._failed, self._steps, self._next = "", 0, 1
        if start.evidence:
            evidence = Path(start.evidence)
            folder = evidence.parent.parent / "numerics" / evidence.name
            self._file = folder / f"rank{dist.get_rank()}.jsonl"
            self._undo = [
                torch_hooks.before_plain_step(self._before_step),
                torch_hooks.on_optimizer_step(self._after_step),
            ]
            self._step = StepNumerics()

    def cell_ended(self, cell: EndedCell) -> Iterable[str]:
        """Say if it could not."""
        self._uninstall()
        if self._failed:
            yield f"%dist diff will not know what the steps have computed: {self._failed}."

    def _uninstall(self) -> None:
        for undo in self._undo:
            undo()
        self._undo = []
        self._forget_step()
        self._within = None

    def _forget_step(self) -> None:
        if self._step is not None:
            self._step.stop()
            self._step = None

    @clocked("guard")
    def _before_step(self, optimizer: Optimizer, _args: Any, _keywords: Any) -> None:
        if self._within is not None and self._within() is not None:
            return
        self._within = ref(optimizer)
        if self._step is not None and not graphs.is_capturing:
            with self._told():
                model, loss = _model_of(optimizer), guard.here.evidence.loss()
                self._step.optimizer_begins(optimizer, model, loss, is_first=not self._steps)

    @clocked("guard")
    def _after_step(self, optimizer: Optimizer, _args: Any, _keywords: Any) -> None:
        if self._within is None or self._within() is not optimizer:
            return
        self._within = None
        self._steps += 1
        if self._step is not None and not self._failed:
            with self._told():
                self._write(self._step.optimizer_ends(optimizer, _model_of(optimizer)))
            self._next = next_recorded(self._steps)
        self._forget_step()
        if self._steps + 1 == self._next and not self._failed:
            self._step = StepNumerics()

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Let training go on where it fails."""
        try:
            yield
        except Exception as error:
            self._failed = named(error).rstrip(".")
            _log.exception("What a step has computed is not known")

    def _write(self, entries: list[list[Any]]) -> None:
        assert self._file is not None, "the cell asks for it"
        folder = self._file.parent
        if self._steps == 1:
            _make(folder)
            self._recorder.fact(**{NUMERICS: folder.name})
            _append(self._file, {"format": FORMAT, "torch": torch.__version__})
        _append(self._file, {"step": self._steps, "entries": entries})


def _model_of(optimizer: Optimizer) -> nn.Module | None:
    model = model_facts.model_of(optimizer)
    return None if model is None else plain(model)


def _make(folder: Path) -> None:
    """Make a folder among others, of which the newest stay."""
    for part in (folder.parent.parent, folder.parent, folder):
        part.mkdir(mode=0o700, exist_ok=True)
    for old in sorted(folder.parent.iterdir())[:-MOST_FOLDERS]:  # names begin with the time
        shutil.rmtree(old, ignore_errors=True)


def _append(file: Path, line: dict[str, Any]) -> None:
    opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(opened, "w", encoding="utf-8") as stream:
        stream.write(json.dumps(line, separators=(",", ":")) + "\n")
