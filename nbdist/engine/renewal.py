"""New backends for a group whose own have let go, and the end of old ones. Main thread."""

import logging
import threading
from typing import Any

import torch.distributed as dist

from nbdist.engine.compat import torch_compat
from nbdist.engine.compat.torch_compat import PrefixStore
from nbdist.engine.membership import Membership

log = logging.getLogger(__name__)

BURY_TIMEOUT_S = 1.0  # normally it takes less than a millisecond


def renew(here: Membership, live: torch_compat.LiveGroup) -> None:
    """Give one group new backends; the other members do the same at this moment."""
    place = PrefixStore(f"{live.name}/", here.place())
    rank = live.ranks.index(here.rank)
    description = live.group.group_desc
    made, gone = [], []
    for devices, old in torch_compat.backends_of(live.group):
        # The same nesting as torch's own for a group it makes: a newcomer's `join` makes it there.
        store = PrefixStore(f"{devices[0].type}/", place)
        new = torch_compat.remake_backend(old, store, live, rank, here.make_gloo)
        made.append((devices, torch_compat.native_slot(old), new))
        gone.append(old)
        del old
    if torch_compat.can_release():
        torch_compat.release_backends(live.group)
        for devices, slot, new in made:
            torch_compat.put_backend(live.group, devices, slot, new)
    else:
        for devices, _, new in made:
            slot = here.next_slot(live.group)
            here.slots[live.group] = slot + 1
            torch_compat.put_backend(live.group, devices, slot, new)
    _bury(gone)
    # A group's name and description live in its backends.
    live.group._set_group_name(live.name)  # type: ignore[arg-type]
    live.group._set_group_desc(description)


def end(group: dist.ProcessGroup) -> None:
    """Let the backends of a destroyed group go here, and not with whoever holds the group last.

    That may be a DDP's reducer: freed with Python's lock held, the backend would wait for its
    threads, and one of these, which tells Python that a collective has ended, for the lock.
    """
    gone = [backend for _, backend in torch_compat.backends_of(group)]
    if torch_compat.can_release():
        torch_compat.release_backends(group)
        _bury(gone)
    else:
        _kept.append(group)


_kept: list[dist.ProcessGroup] = []


def _bury(backends: list[Any]) -> None:
    """Drop the last references to old backends, without trusting them to go.

    A backend waits for what was launched on it. Should that never end, a thread is lost and not
    the rank: its destructor runs without Python's lock.
    """
    undertaker = threading.Thread(target=backends.clear, name="nbdist-old-backend", daemon=True)
    undertaker.start()
    undertaker.join(BURY_TIMEOUT_S)
    if undertaker.is_alive():
        log.warning("An old backend of the process group still waits for an operation.")
