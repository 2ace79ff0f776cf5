"""What ranks run in the tests of checkpoints that fail: what is said, and what has changed."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from threading import Event
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import nbdist
from nbdist.engine.checkpoint import save
from nbdist.engine.checkpoint.folder import CheckpointFolder
from nbdist.engine.checkpoint.saving import Saving
from nbdist.engine.checkpoint.steady import Staged
from nbdist.engine.compat.checkpoints.torch_checkpoint import Writer, Written
from nbdist.engine.compat.torch_hooks import local_part
from nbdist.engine.layout.parallelize import parallelize
from tests.group import checkpoint_ranks
from tests.group.checkpoint_ranks import Dropping, Training, error_of
from tests.group.harness import HANG_S
from tests.group.parity_cases import Case

Options = dict[str, Any]


# ---- Saved and restored -------------------------------------------------------------------------


def save_at(folder: str, case: Case, at: list[int], how: Options | None = None) -> None:
    """Save at these steps."""
    end()
    training = Training(case, seed=5)
    for step, before in zip(at, [0, *at], strict=False):
        training.train(step - before)
        nbdist.save(folder, wait=True, **(how or {}))
    training.end()
    checkpoint_ranks.wait_for_saves()


def save_often_and_go_on(
    folder: str, case: Case, at: list[int], more: int, how: Options
) -> dict[str, Any]:
    """Save at these steps with keep=2, and train on from the last; returns the state at the end."""
    end()
    training = Training(case)
    made = 0
    for step in at[:-1]:
        training.train(step - made)
        nbdist.save(folder, wait=True, keep=2, **how)
        made = step
    last = at[-1] - made
    training.train(last + more, last, lambda: nbdist.save(folder, wait=True, keep=2, **how))
    found = training.state()
    training.end()
    checkpoint_ranks.wait_for_saves()
    return found


def restore_and_go_on(folder: str, case: Case, more: int, how: Options) -> dict[str, Any]:
    """As `checkpoint_ranks.restore_and_go_on`."""
    end()
    return checkpoint_ranks.restore_and_go_on(folder, case, more, **how)


def resumed_like(folder: str, case: Case, step: int) -> dict[str, Any]:
    """Restore a step that `save_at` has saved, and return it beside the training that made it."""
    end()
    training = Training(case, seed=5)
    training.train(step)
    unbroken = fingerprint(training)
    training.train(1)
    nbdist.restore(folder, which=step)
    resumed = fingerprint(training)
    training.end()
    return {"unbroken": unbroken, "resumed": resumed}


def hold(case: Case, seed: int) -> None:
    """Train a step from a seed, for `save_what_is_held`."""
    end()
    _living.append(Training(case, seed=seed))
    _living[0].train(1)


def save_what_is_held(folder: str, options: Options) -> dict[str, str]:
    """Save it; returns where it lies, or the error."""
    saved: list[str] = []

    def save() -> None:
        saved.append(nbdist.save(folder, wait=True, storage_options=options).folder)

    return {"error": error_of(save), "folder": "".join(saved)}


def is_what_was_held(folder: str, options: Options) -> bool:
    """Return whether a checkpoint is the training that is held, to the bit."""
    (training,) = _living
    before = fingerprint(training)
    nbdist.restore(folder, storage_options=options)
    return fingerprint(training) == before


# ---- Errors -------------------------------------------------------------------------------------


def error_of_restore(folder: str, case: Case, how: Options, change: str = "") -> dict[str, Any]:
    """Train a little, restore, and return what was raised, and whether anything has changed."""
    training = _changed(case, change) if change else _held(case)
    before = fingerprint(training)
    said = error_of(nbdist.restore, folder, **how)
    is_unchanged = fingerprint(training) == before
    if change or not is_unchanged:
        end()
    return {"error": said, "is_unchanged": is_unchanged}


def error_of_save(
    folder: str, case: Case, how: Options, *, is_copied: bool = False
) -> dict[str, Any]:
    """Train a little, save, and return what was raised."""
    training = _held(case)
    before = fingerprint(training)

    def saved() -> None:
        nbdist.save(folder, wait=not is_copied, **how).wait()

    said = error_of(saved)
    return {"error": said, "is_unchanged": fingerprint(training) == before}


def error_of_full_disk(folder: str, case: Case, file: str) -> dict[str, Any]:
    """As `error_of_save`, where no byte can be written to one of the files."""

    def fill(place: CheckpointFolder, name: str) -> None:
        home = Path(place.url) if file == "latest" else Path(place.url, name)
        temporary = "" if file.endswith(".distcp") else ".tmp"
        os.symlink("/dev/full", home / f"{file}{temporary}")

    with _when_begun(fill):
        said = error_of_save(folder, case, {})
    Path(folder, "latest.tmp").unlink(missing_ok=True)
    return said


def error_of_unreadable(folder: str, case: Case, rank: int) -> dict[str, Any]:
    """As `error_of_save`, where what one rank keeps cannot be saved."""
    kept = _held(case).average
    if dist.get_rank() == rank:
        nbdist.keep(average=Unreadable())
    said = error_of_save(folder, case, {})
    nbdist.keep(average=kept)
    return said


def error_of_no_memory(folder: str, case: Case, rank: int) -> dict[str, Any]:
    """As `error_of_save`, where one rank has no memory for its copies."""
    no_memory = mock.patch.object(Staged, "copy", side_effect=MemoryError("no memory for copies"))
    try:
        with no_memory if dist.get_rank() == rank else nullcontext():
            return error_of_save(folder, case, {}, is_copied=True)
    except MemoryError as error:
        return {"error": f"MemoryError: {error}"}


def error_of_interrupt(folder: str, case: Case, rank: int) -> dict[str, Any]:
    """Save and wait, which is interrupted on one rank while all of them write.

    Returns:
        What was raised; what each rank's save says at last; which checkpoints count.
    """
    training = _held(case)
    is_left, write = Event(), Writer.write

    def late(*given: Any) -> Written:
        assert is_left.wait(HANG_S)
        return write(*given)

    def interrupted(saving: Saving, timeout: float | None = None) -> Saving:
        if dist.get_rank() == rank:
            raise KeyboardInterrupt
        is_left.set()
        return wait(saving, timeout)

    wait = Saving.wait
    with (
        mock.patch.object(Writer, "write", late),
        mock.patch.object(Saving, "wait", interrupted),
    ):
        try:
            said = error_of(nbdist.save, folder, wait=True)
        except KeyboardInterrupt:
            said = "interrupted"
            for parameter in training.layout.model.parameters():
                local_part(parameter).data.zero_()
            is_left.set()
        save.here.settle()
    end()
    return {"error": said, "count": [path.name for path in Path(folder).glob("*/*.json")]}


def error_of_dying_server(folder: str, case: Case, how: Options, pid: int) -> dict[str, Any]:
    """As `error_of_save`, where the server is killed when the folder has been made."""
    with _when_begun(lambda _place, _name: os.kill(pid, signal.SIGKILL)):
        return error_of_save(folder, case, how)


@contextmanager
def _when_begun(do: Callable[[CheckpointFolder, str], None]) -> Iterator[None]:
    """Have something done on the rank that makes a checkpoint's folder, when it has."""
    begin = CheckpointFolder.begin

    def begin_and_do(self: CheckpointFolder, name: str, nbytes: int) -> None:
        begin(self, name, nbytes)
        do(self, name)

    CheckpointFolder.begin = begin_and_do  # type: ignore[method-assign]
    try:
        yield
    finally:
        CheckpointFolder.begin = begin  # type: ignore[method-assign]


def error_without_a_training(folder: str) -> str:
    """Save where nothing is trained."""
    end()
    return error_of(nbdist.save, folder)


def delete(url: str, options: Options) -> None:
    """Delete one file behind a URL."""
    import fsspec  # type: ignore[import-untyped]

    files, path = fsspec.core.url_to_fs(url, **options)
    files.rm_file(path)


_living: list[Training] = []


def _held(case: Case) -> Training:
    """Return the training of this case that has made a step; the same for the next test."""
    if not _living or _living[0].case != case:
        end()
        _living.append(Training(case))
        _living[0].train(1)
    return _living[0]


def end() -> None:
    """End the training that is held."""
    while _living:
        _living.pop().end()


# ---- Trainings ----------------------------------------------------------------------------------


class Wider(Dropping):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(self.head.in_features, self.head.out_features + 1, bias=False)


class Less(Dropping):
    def __init__(self) -> None:
        super().__init__()
        del self.head


class Unreadable(checkpoint_ranks.Average):
    """Has a state that cannot be asked for."""

    def state_dict(self) -> dict[str, float]:
        raise ValueError("this object tells nothing")


class Refusing(checkpoint_ranks.Average):
    def load_state_dict(self, state: dict[str, float]) -> None:
        raise ValueError("this object refuses its state")


def _changed(case: Case, change: str) -> Training:
    """Hold a training that differs from the one that was saved, and return it."""
    end()
    training = Training(case)
    _living.append(training)
    if change in ("wider", "less"):
        training.end()
        made = (Wider if change == "wider" else Less)()
        training.layout = parallelize(made, case.layout)
        training.opt = training.layout.optimizer(torch.optim.AdamW, lr=1e-2)
        training.scheduler = torch.optim.lr_scheduler.StepLR(training.opt, 2, 0.5)
    if change == "sgd":
        training.end()
        training.opt = training.layout.optimizer(torch.optim.SGD, lr=1e-2)
        training.scheduler = torch.optim.lr_scheduler.StepLR(training.opt, 2, 0.5)
    if change == "refusing":
        training.average = Refusing()
        nbdist.keep(average=training.average)
    return training


def fingerprint(training: Training) -> list[Any]:
    """Return all that a restore could change on this rank, as plain values."""
    optimizer = training.opt
    inner = getattr(optimizer, "optim", optimizer)
    states = [
        local_part(value).tolist() if isinstance(value, torch.Tensor) else value
        for group in inner.param_groups
        for parameter in group["params"]
        for _, value in sorted(inner.state[parameter].items())
    ]
    parameters = [local_part(p.detach()).tolist() for p in training.layout.model.parameters()]
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return [
        parameters,
        states,
        groups,
        training.scheduler.state_dict(),
        {k: v for k, v in training.loader._standing.saved().items() if k != "journal"},
        training.average.value,
        torch.get_rng_state().tolist(),
    ]
