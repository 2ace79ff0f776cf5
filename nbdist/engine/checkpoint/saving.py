"""One checkpoint on its way to the disk: planned by all ranks together, written beside training.

    main thread, all ranks      a thread on each rank        rank 0's
    plan ─▶ copy ─▶             copy the rest, write ─▶      training.pt, .metadata, commit

The thread runs no collective, for a group that two threads share crashes: ranks tell rank 0 through
the store that they are done, and it commits, or deletes what there is where one failed. A rank that
dies ends the save; the checkpoint before it still counts.
"""

import contextlib
import io
import logging
import pickle
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import nbdist
from nbdist.engine.checkpoint import folder, manifest, planning, steady
from nbdist.engine.checkpoint.agreement import one_error
from nbdist.engine.checkpoint.manifest import Manifest
from nbdist.engine.checkpoint.planning import AgreedSave, PreparedSave, SaveRequest, writer_of
from nbdist.engine.checkpoint.steady import Copying, Staged, stage
from nbdist.engine.compat.checkpoints.torch_checkpoint import Writer, Written
from nbdist.engine.group import state
from nbdist.engine.tap.interruptible_store import PatientStore, ReleasedError
from nbdist.shared.errors import CheckpointError, NBDistError

_OTHERS = timedelta(seconds=30)  # for what others write of a save that is given up
_LIMIT = timedelta(hours=6)  # for the slowest rank's file; a rank that dies ends the wait at once

_TOLD = ("step", "folder", "nbytes", "blocked_s", "seconds")  # of a save, in any process

_log = logging.getLogger("nbdist.checkpoint")

Facts = dict[str, Any]


class Saving:
    """A checkpoint that is being written. Made on all ranks together.

    Attributes:
        step: Steps of the training's optimizer.
        folder: Where it lies.
        nbytes: Of this rank's tensors.
        blocked_s: How long training stood still for it on this rank.
        seconds: From its begin to its commit; 0 before.
    """

    def __init__(self, agreed: AgreedSave, began: float, *, waits: bool = False) -> None:
        """Begin to copy this rank's part, and to write it. Main thread.

        Args:
            agreed: What all ranks save, each its part.
            began: By `time.monotonic`, when training stood still.
            waits: Whether the caller changes nothing until `wait` has returned, or `leave` is
                called: tensors are then written without a copy.
        """
        self._began, self._waits = began, waits
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        prepared, plan, self._id, self._name = agreed
        self._request, self._plan = prepared.request, plan
        self.step, self.nbytes, self.seconds = self._request.step, plan.nbytes, 0.0
        self.folder = self._request.place.folder(self._name)
        self._store = PatientStore(state.here.member().client)
        self._is_done = threading.Event()
        self._is_over = threading.Event()  # and older ones are deleted
        self._error: NBDistError | None = None
        self._told: tuple[Facts, BaseException | None] = {}, None
        self._is_told = threading.Event()
        self._copying: Copying | None = None
        self.blocked_s = 0.0
        try:
            self._copying = self._copy(prepared)
            threading.Thread(target=self._run, name="nbdist-save", daemon=True).start()
        except BaseException as error:
            self._abandon(error)
            raise
        self._blocked(time.monotonic() - self._began)

    def __repr__(self) -> str:
        if not self._is_done.is_set():
            return f"<checkpoint of step {self.step:,}, being written to {self.folder}>"
        if self._error is not None:
            return f"<checkpoint of step {self.step:,}, not written: {self._error.what}>"
        return f"<checkpoint of step {self.step:,} in {self.folder}>"

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel to a new rank, or to the notebook, as what there is to tell of it."""
        kept = {name: getattr(self, name) for name in (*_TOLD, "_error")}
        return _retold, (kept,)

    @property
    def is_done(self) -> bool:
        """Whether it is written, or has failed."""
        return self._is_done.is_set()

    @property
    def error(self) -> NBDistError | None:
        """Why it was not written; None while it is, and when it is."""
        return self._error

    def go(self, facts: Callable[[], Facts]) -> None:
        """Have the thread write. Main thread, each rank; once.

        Args:
            facts: What this rank tells beside tensors; called at once. That it fails is an error
                of the save, on all ranks.
        """
        own: Facts = {}
        error: BaseException | None = None
        began = time.monotonic()
        try:
            own = facts()
        except Exception as raised:
            error = CheckpointError(
                "What is saved beside tensors could not be read.",
                why=f"{type(raised).__name__}: {raised}",
                do="its state_dict is to return what torch.save can write",
            )
            error.__cause__ = raised
        except BaseException as raised:
            error = raised
        # Also where it has failed: the others wait for this rank's word.
        self._told = own, error
        self._is_told.set()
        self._blocked(time.monotonic() - began)
        if error is not None and not isinstance(error, Exception):
            raise error

    def wait(self, timeout: float | None = None) -> "Saving":
        """Return when the checkpoint counts, or has `timeout` seconds later not been written.

        Raises:
            CheckpointError: It was not written.
        """
        began = time.monotonic()
        self._is_done.wait(timeout)
        self._blocked(time.monotonic() - began)
        if self._error is not None:
            error = self._error
            raise type(error)(error.what, why=error.why, do=error.do)
        return self

    def settle(self, timeout: float | None = None) -> None:
        """Return when it is over, however, or `timeout` seconds later.

        Over means that older checkpoints are deleted, too: the next save of the place may begin.
        """
        self._is_over.wait(timeout)

    def copied(self) -> None:
        """Return when this rank's part is copied: it may be changed from here on. Main thread."""
        if self._copying is not None:
            self._copying.settle()

    def leave(self) -> None:
        """Say that this rank no longer waits, and may change what was not copied. Main thread."""
        if self._waits and self._copying is not None:
            self._copying.leave()

    def give_up(self, why: str) -> None:
        """End it: a rank that has a part of it is gone. Any thread."""
        self._store.release(why)

    # -- the thread

    def _run(self) -> None:
        """Copy and write this rank's part, unless that failed, and hear how it went elsewhere."""
        error: BaseException | None = None
        try:
            error = self._copy_rest()
            self._is_told.wait()
            facts, failed = self._told
            error = error or failed
            writer = writer_of(self._request.place, self.folder)
            if error is None:
                error = self._write(writer, facts)
            else:
                self._tell(error)
            if self._rank == 0:
                self._commit(writer)
            else:
                self._hear()
            self._finish(None)
            if self._rank == 0:
                _tidy(self._request, self._name)
        except BaseException as verdict:
            self._finish(error if isinstance(verdict, ReleasedError) and error else verdict)
        finally:
            self._is_over.set()

    def _copy_rest(self) -> BaseException | None:
        assert self._copying is not None
        try:
            self._copying.copy()
        except BaseException as error:
            return error
        return None

    def _write(self, writer: Writer, facts: Facts) -> BaseException | None:
        assert self._copying is not None
        try:
            written = writer.write(self._plan, self._copying.staged.content)
            self._copying.require_one_moment()
            self._tell(None, (written, facts))
        except BaseException as error:
            self._tell(error)
            return error
        return None

    def _copy(self, prepared: PreparedSave) -> Copying:
        """Begin to copy: all at once, or what is steady while training goes on.

        Nothing is copied where training stands still until all is written.
        """
        sources, room = prepared.planner.sources(self._plan), planning.remembered.buffers
        if self._waits:
            staged = Staged(room)
            staged.borrow(sources)
            return Copying(staged, {}, (), self._blocked, is_trial=True)
        unchanging, optimizers = prepared.steady, prepared.training.optimizers
        at_once = not unchanging or not steady.here.are_proven(optimizers)
        staged = stage(sources, unchanging, room, at_once=at_once)
        waiting = optimizers if unchanging else ()
        return Copying(staged, unchanging, waiting, self._blocked, is_trial=at_once)

    def _blocked(self, seconds: float) -> None:
        """Count seconds for which training stood still."""
        self.blocked_s += seconds

    def _abandon(self, error: BaseException) -> None:
        """Have no other rank wait for this one, which goes no further. Main thread."""
        if self._copying is not None:
            self._copying.give_up()
        self._tell(error)
        if self._rank == 0:
            # What others still write would come back after the deletion.
            with contextlib.suppress(Exception):
                self._store.wait([self._key(rank) for rank in range(self._ranks)], _OTHERS)
            planning.delete(self._request.place, self._name)
            self._store.set(self._key("done"), pickle.dumps(self._reason(error)))
        self._finish(error)
        self._is_over.set()

    def _key(self, what: object) -> str:
        return f"nbdist/save/{self._id}/{what}"

    def _tell(self, error: BaseException | None, facts: Any = None) -> None:
        """Tell rank 0 how it went here."""
        try:
            failed = None if error is None else self._reason(error)
            self._store.set(self._key(self._rank), pickle.dumps((failed, facts)))
        except Exception:
            _log.exception("The others were not told of the checkpoint of step %d", self.step)

    def _commit(self, writer: Writer) -> None:
        """Wait for all ranks' files and have the checkpoint count. On rank 0."""
        try:
            keys = [self._key(rank) for rank in range(self._ranks)]
            self._store.wait(keys, _LIMIT)
            every = [pickle.loads(text) for text in self._store.multi_get(keys)]
            for key in keys:
                self._store.deleteKey(key)
            failed = {rank: error for rank, (error, _) in enumerate(every) if error is not None}
            if failed:
                raise one_error(failed, self._ranks)
            written = [one[0] for _, one in every]
            self._write_rest(writer, written, [one[1] for _, one in every])
        except BaseException as error:
            reason = self._reason(error)
            planning.delete(self._request.place, self._name)
            self._store.set(self._key("done"), pickle.dumps(reason))
            raise reason from error
        self._store.set(self._key("done"), pickle.dumps(None))

    def _write_rest(self, writer: Writer, written: list[Written], facts: list[Facts]) -> None:
        place, request = self._request.place, self._request
        files = {n: (f.size, f.crc) for one in written for n, f in one.files.items()}
        content = io.BytesIO()
        torch.save(facts, content)
        files[folder.TRAINING] = place.write(self._name, folder.TRAINING, content.getvalue())
        metadata = writer.finish(self._plan.metadata, written)
        files[".metadata"] = (metadata.size, metadata.crc)
        commit = Manifest(
            request.step,
            time.time(),
            self._ranks,
            dict(request.layouts),
            files,
            request.metric,
            nbdist.__version__,
            torch.__version__,
            is_automatic=request.is_automatic,
            holds=facts[0].get("holds", {}),
        )
        place.commit(self._name, commit)

    def _hear(self) -> None:
        """Wait for rank 0's word."""
        self._store.wait([self._key("done")], _LIMIT)
        error = pickle.loads(self._store.get(self._key("done")))
        if error is not None:
            raise error

    def _finish(self, error: BaseException | None) -> None:
        if error is not None:
            self._error = self._reason(error)
            _log.warning("%s", self._error)
        self.seconds = time.monotonic() - self._began
        self._is_done.set()

    def _reason(self, error: BaseException) -> NBDistError:
        if isinstance(error, ReleasedError):
            return CheckpointError(
                f"The checkpoint of step {self.step:,} was not written: {error}."
            )
        return error if isinstance(error, NBDistError) else folder.reason(error, self.folder)


def _retold(kept: dict[str, Any]) -> Saving:
    """Return a save of another process, which is over as far as this one knows."""
    saving = Saving.__new__(Saving)
    vars(saving).update(kept, _is_done=threading.Event(), _is_over=threading.Event())
    saving._is_done.set()
    saving._is_over.set()
    return saving


# ---- Its parts ----------------------------------------------------------------------------------


def _tidy(request: SaveRequest, newest: str) -> None:
    """Delete what is one too many; that this fails is no reason to say that nothing was saved.

    What cells save by themselves takes no place from what was asked for, nor the other way round.
    """
    place = request.place
    try:
        committed = place.committed()
        best = manifest.best_of(committed)
        if best is not None:
            place.point_to_best(best)
        of_kind = {n: c for n, c in committed.items() if c.is_automatic == request.is_automatic}
        for name in manifest.to_delete(of_kind, request.keep, best, newest):
            place.delete(name)
        place.delete_interrupted(newest)
    except Exception:
        _log.exception("Older checkpoints in %s were not deleted", place.url)
