"""Put back the modes of torch that a cell which was cut short may have left switched.

`with torch.no_grad():` switches gradients off in its `__enter__`. An interrupt that strikes right
there is raised before the `with` has begun, and nobody switches them on again: every later cell
would fail with "element 0 of tensors does not require grad". The same holds for autocast.

Main thread only; torch keeps these modes for each thread.
"""

from dataclasses import dataclass

import torch

_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class Modes:
    """Whether gradients are recorded, and on which kinds of device autocast is on."""

    grad: bool
    autocast: tuple[bool, ...]


def current() -> Modes:
    """Return the modes of this thread."""
    return Modes(
        torch.is_grad_enabled(), tuple(torch.is_autocast_enabled(device) for device in _DEVICES)
    )


def restore(modes: Modes) -> None:
    """Switch this thread back to `modes`."""
    torch.set_grad_enabled(modes.grad)
    for device, enabled in zip(_DEVICES, modes.autocast, strict=True):
        torch.set_autocast_enabled(device, enabled)
