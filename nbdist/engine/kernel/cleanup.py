"""Clean up after a failed or interrupted cell: frames, and processes it waits for."""

import multiprocessing
import signal
import threading
import traceback
from collections.abc import Iterable
from dataclasses import dataclass

import psutil
import torch

from nbdist.engine.component import Component, EndedCell
from nbdist.engine.kernel import interrupts
from nbdist.shared.wire import CellStart


def release_frames(error: BaseException | None) -> None:
    """Clear the frames of an error and of its causes.

    Python and IPython keep them until the next error: the activations of a step, and a DataLoader's
    iterator, whose workers would keep running. On a rank no debugger can use them.

    Args:
        error: The exception that ended the cell, already reported; None if there is none.
    """
    if error is None:
        return
    if not multiprocessing.active_children():
        _clear(error)
        return
    # A DataLoader waits up to 5 s for a worker that is processing an item.
    threading.Thread(target=_clear, args=[error], name="nbdist-leftovers", daemon=True).start()


def _clear(error: BaseException) -> None:
    seen = set()
    links: list[BaseException | None] = [error]
    while links:
        link = links.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        for frame, _ in traceback.walk_tb(link.__traceback__):
            try:
                frame.clear()
                # Formatting a traceback reads this dict, and Python 3.11 and 3.12 keep it in
                # the frame until it is read again.
                _ = frame.f_locals
            except RuntimeError:
                continue  # still running
        links += [link.__cause__, link.__context__]


def interrupt_children(message: str) -> int:
    """Interrupt the commands that this message may wait for; returns how many. Any thread.

    `os.system` shields this process from an interrupt, as C's `system` does: in a terminal it is
    the command that receives it. Processes of multiprocessing, a DataLoader's workers among them,
    obey their own main thread and are left alone. So are those of a later message.
    """
    with interrupts.here.while_it_runs(message) as runs:
        return _interrupt_children() if runs else 0


def _interrupt_children() -> int:
    own = {child.pid for child in multiprocessing.active_children()}
    count = 0
    for child in psutil.Process().children():
        if child.pid in own:
            continue
        try:
            for process in [child, *child.children(recursive=True)]:
                process.send_signal(signal.SIGINT)
            count += 1
        except psutil.Error:
            continue  # it has ended
    return count


_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class Modes:
    """Whether gradients are recorded, and the device types with autocast."""

    grad: bool
    autocast: tuple[bool, ...]


def current_modes() -> Modes:
    """Return the modes of this thread."""
    return Modes(
        torch.is_grad_enabled(), tuple(torch.is_autocast_enabled(device) for device in _DEVICES)
    )


def restore_modes(modes: Modes) -> None:
    """Switch this thread back to `modes`.

    `with torch.no_grad():` switches gradients off in its `__enter__`. An interrupt that strikes
    right there is raised before the `with` has begun, and they are never switched on again: every
    later cell would fail with "element 0 of tensors does not require grad". The same holds for
    autocast. Main thread; torch keeps these modes for each thread.
    """
    torch.set_grad_enabled(modes.grad)
    for device, enabled in zip(_DEVICES, modes.autocast, strict=True):
        torch.set_autocast_enabled(device, enabled)


class TorchModes(Component):
    """Restores torch's modes after a failed cell."""

    def __init__(self) -> None:
        self._before = current_modes()

    def cell_began(self, start: CellStart) -> None:
        """Save the modes."""
        self._before = current_modes()

    def cell_ended(self, cell: EndedCell) -> Iterable[str]:
        """Restore them if the cell has failed: it may have been cut off inside a mode."""
        if not cell.has_succeeded:
            restore_modes(self._before)
        return ()
