"""New backends for a group after an abort, and the end of old ones. Main thread."""

import logging
import threading
from collections import deque
from typing import Any

import torch.distributed as dist

from nbdist.engine.compat.groups import torch_backends, torch_groups
from nbdist.engine.compat.groups.torch_groups import PrefixStore
from nbdist.engine.group.state import GroupState
from nbdist.engine.tap import counters

log = logging.getLogger(__name__)

BURY_TIMEOUT_S = 1.0  # normally it takes less than a millisecond
MOST_ENDED = 8


def renew(here: GroupState, live: torch_groups.LiveGroup) -> None:
    """Give one group new backends; the other members do the same at this moment."""
    place = PrefixStore(f"{live.name}/", here.place())
    rank = live.ranks.index(here.rank)
    description = live.group.group_desc
    made, gone = [], []
    for devices, old in torch_backends.backends_of(live.group):
        # Nested as torch does for a group it makes: a new rank's `join` makes it there.
        store = PrefixStore(f"{devices[0].type}/", place)
        new = torch_backends.remake_backend(old, store, live, rank, here.make_gloo)
        made.append((devices, torch_backends.native_slot(old), new))
        gone.append(old)
        del old
    if torch_backends.can_release():
        torch_backends.release_backends(live.group)
        for devices, slot, new in made:
            torch_backends.put_backend(live.group, devices, slot, new)
    else:
        for devices, _, new in made:
            slot = here.next_slot(live.group)
            here.slots[live.group] = slot + 1
            torch_backends.put_backend(live.group, devices, slot, new)
    _bury(gone)
    # A group's name and description are kept in its backends.
    live.group._set_group_name(live.name)  # type: ignore[arg-type]
    live.group._set_group_desc(description)


class EndedGroups:
    """Keeps the groups that were destroyed last."""

    def __init__(self) -> None:
        self._groups: deque[dist.ProcessGroup] = deque()

    def end(self, group: dist.ProcessGroup) -> None:
        """Keep a destroyed group's backends from being freed with its last reference.

        That may be a DDP's reducer: freed while holding the GIL, the backend would wait for its
        threads, one of which waits for the GIL to say that a collective has ended. A few groups
        are kept: peers may still read what was sent, and a call on one raises an error with its
        name.
        """
        counters.end(group)
        self._groups.append(group)
        while len(self._groups) > MOST_ENDED:
            old = self._groups.popleft()
            gone: list[Any] = [backend for _, backend in torch_backends.backends_of(old)]
            if torch_backends.can_release():
                torch_backends.release_backends(old)
            gone.append(old)
            del old
            _bury(gone)


def _bury(backends: list[Any]) -> None:
    """Drop the last references to old backends, which may block.

    A backend waits for what was launched on it. Should that never end, a thread is lost, not
    the rank: its destructor runs without Python's lock.
    """
    undertaker = threading.Thread(target=backends.clear, name="nbdist-old-backend", daemon=True)
    undertaker.start()
    undertaker.join(BURY_TIMEOUT_S)
    if undertaker.is_alive():
        log.warning("An old backend of the process group still waits for an operation.")


here = EndedGroups()
