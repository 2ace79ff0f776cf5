"""Save the state of DDP's communication hooks at each step, and restore it after a fault.

PowerSGD carries over what each step's compression left out, and the directions it compresses in. A
step that is lost has consumed them; repeated without them it would differ. So they are
noted when a hook is registered and at every boundary (the end of an optimizer step), and `reset`
goes back to the note.

PowerSGD over gloo works with one bucket only, and is refused with more: its callbacks wait for
further collectives inside gloo's threads. With two threads that hangs; with more, ranks pair the
collectives of different buckets, and replicas differ without an error (seen with torch 2.13).

A note copies nothing large: PowerSGD replaces its error tensors and never writes into them, so the
note keeps the old ones alive (as much memory as the gradients have). What it does write into, Q, is
copied: a thousandth of that.
"""

import functools
import math
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from nbdist.engine.compat import torch_live, torch_modules, torch_reducers
from nbdist.engine.group import ddp_buckets
from nbdist.shared.errors import LayoutError

# The fields of each kind of state that a step changes. p_memory_dict's tensors are written before
# they are read; that they exist is what counts.
_FIELDS = {
    "PowerSGDState": (
        "error_dict",
        "p_memory_dict",
        "q_memory_dict",
        "rng",
        "iter",
        "total_numel_before_compression",
        "total_numel_after_compression",
        "next_stats_report",
    ),
    "PostLocalSGDState": ("iter",),
    "Rounding": ("errors", "orders", "loose"),
}
_WRITTEN_INTO = "q_memory_dict"

Note = dict[str, Any]  # field of the state: its value


class HookStates:
    """The notes of all living communication hooks."""

    def __init__(self) -> None:
        self._notes: WeakKeyDictionary[DistributedDataParallel, list[tuple[Any, Note]]]
        self._notes = WeakKeyDictionary()
        self._registered = 0  # hooks so far
        # What was made and registered so far, when a boundary had nothing to note, and none after
        # it will.
        self._quiet: tuple[int, int, int] | None = None

    def watch(self) -> None:
        """Look at every hook that is registered from here on: refuse it, or note its state.

        Its first step may fail before there has been a boundary.
        """
        native = DistributedDataParallel.register_comm_hook
        if getattr(native, "_nbdist_watches", False):
            return

        @functools.wraps(native)
        def register_comm_hook(
            ddp: DistributedDataParallel, state: object, hook: Callable[..., Any]
        ) -> None:
            if type(state).__name__ == "PowerSGDState":
                _refuse_buckets(ddp)
            self._registered += 1
            native(ddp, state, hook)
            self._take_notes(ddp)

        register_comm_hook._nbdist_watches = True  # type: ignore[attr-defined]
        kind: Any = DistributedDataParallel
        kind.register_comm_hook = register_comm_hook

    def snapshot(self) -> None:
        """Note the state of every live communication hook. Main thread, at a boundary."""
        now = torch_live.here.newest_number(), torch_reducers.remade(), self._registered
        if now == self._quiet:
            return
        ddps = torch_live.here.live(DistributedDataParallel)
        is_quiet = ddp_buckets.here.at_boundary(ddps)
        for ddp in ddps:
            self._take_notes(ddp)
            is_quiet = is_quiet and not torch_modules.has_comm_hooks(ddp)
        self._quiet = now if is_quiet else None

    def restore(self, ddp: DistributedDataParallel) -> list[str]:
        """Bring a module's hooks back to the last boundary; returns what was done, in words.

        A hook whose state is of no known kind is left alone, and this is said.
        """
        notes = {id(state): note for state, note in self._notes.get(ddp, [])}
        done = []
        for hook, state in torch_modules.comm_hooks_of(ddp):
            name = getattr(hook, "__name__", type(hook).__name__)
            if id(state) in notes:
                _restore(state, notes[id(state)])
                done.append(f"{name}'s state restored")
            elif state is not None and not isinstance(state, dist.ProcessGroup):
                done.append(f"{name}'s {type(state).__name__} left as the lost step made it")
        return done

    def _take_notes(self, ddp: DistributedDataParallel) -> None:
        notes = _notes_of(ddp)
        if notes:
            self._notes[ddp] = notes


def kept(ddp: DistributedDataParallel) -> Callable[[], None]:
    """Return a function that restores a module's hooks to their present state."""
    notes = _notes_of(ddp)

    def put_back() -> None:
        for state, note in notes:
            _restore(state, note)

    return put_back


def differs_by_rank() -> list[DistributedDataParallel]:
    """Return the living modules whose hook has state of this rank alone: its errors."""
    return [
        ddp
        for ddp in torch_modules.live_ddps()
        if any(
            type(state).__name__ in ("PowerSGDState", "Rounding") and state.use_error_feedback
            for _, state in torch_modules.comm_hooks_of(ddp)
        )
    ]


def _refuse_buckets(ddp: DistributedDataParallel) -> None:
    size_mb, cap_mb = torch_reducers.first_bucket_mb(ddp)
    if size_mb <= cap_mb or "gloo" not in dist.get_backend(ddp.process_group):
        return
    raise LayoutError(
        f"PowerSGD over gloo needs the gradients in one bucket; {size_mb:.3g} MB make several.",
        why="gloo's threads wait inside the hook, and ranks hang or pair different buckets",
        do=f"DDP(model, bucket_cap_mb={math.ceil(size_mb)}), or parameters on GPUs with NCCL",
    )


def _notes_of(ddp: DistributedDataParallel) -> list[tuple[Any, Note]]:
    return [
        (state, _note(state, fields))
        for _, state in torch_modules.comm_hooks_of(ddp)
        if (fields := _FIELDS.get(type(state).__name__))
    ]


def _note(state: Any, fields: tuple[str, ...]) -> Note:
    note: Note = {}
    for field in fields:
        value = getattr(state, field)
        if field == "rng":
            value = value.get_state()
        note[field] = _copied(field, value)
    return note


def _restore(state: Any, note: Note) -> None:
    for field, value in note.items():
        if field == "rng":
            state.rng.set_state(value)
        else:
            # Copied again: the same note may be needed twice.
            setattr(state, field, _copied(field, value))


def _copied(field: str, value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {
        key: tensor.clone() if field == _WRITTEN_INTO else tensor for key, tensor in value.items()
    }


here = HookStates()
