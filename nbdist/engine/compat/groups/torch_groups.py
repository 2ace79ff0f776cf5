"""torch's private parts of process groups: their books, how one is made, named, destroyed.

`torch_backends.py` has what is below them, `torch_modules.py` what belongs to wrapped modules,
`torch_hooks.py` the places where tap and training look on. `check()` says what broke when a version
moves. Tried with torch 2.13.0 and 2.15.0 (CPU): tests/group.
"""

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

# Public as torch.distributed.Store, ...; its types say so only here.
from torch._C._distributed_c10d import PrefixStore as PrefixStore
from torch._C._distributed_c10d import Store as Store
from torch._C._distributed_c10d import TCPStore as TCPStore
from torch._C._distributed_c10d import _ProcessGroupWrapper, _register_process_group
from torch.distributed import c10d_logger

from nbdist.engine.compat.groups.group_spec import GroupSpec
from nbdist.engine.compat.groups.torch_backends import LiveGroup as LiveGroup
from nbdist.engine.compat.groups.torch_backends import backends_of
from nbdist.engine.compat.lacking import lacking


def check() -> list[str]:
    """Return what this torch lacks of what we use, in words; empty when all is there."""
    return [f"torch {torch.__version__}: {what}" for what in _broken()]


# The names that newer versions give to all_gather_into_tensor and reduce_scatter_tensor, which warn
# from then on.
all_gather_single: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
reduce_scatter_single: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


def live_groups() -> list[LiveGroup]:
    """Return every group of this process, the default one first, then in order of making."""
    world = c10d._world
    return [
        LiveGroup(
            str(world.pg_names[group]),
            tuple(sorted(world.pg_group_ranks[group], key=world.pg_group_ranks[group].__getitem__)),
            group,
        )
        for group in list(world.pg_map)
        # A group half made has no ranks yet.
        if group in world.pg_group_ranks and group in world.pg_names
    ]


def ranks_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Return a group's global ranks, in its order; empty for one that torch has no books of."""
    members = c10d._world.pg_group_ranks.get(group, {})
    return tuple(sorted(members, key=members.__getitem__))


def spec_of(group: dist.ProcessGroup) -> GroupSpec:
    """Return with what a group of this process was made."""
    world = c10d._world
    backend = backends_of(group)[0][1]
    if isinstance(backend, _ProcessGroupWrapper):
        backend = backend.wrapped_pg
    tag = str(world.pg_to_tag.get(group, ""))
    return GroupSpec(
        str(world.pg_map[group][0]),
        backend.options._timeout.total_seconds(),
        group.group_desc,
        tag.removeprefix(_USERS_TAG) if tag.startswith(_USERS_TAG) else "",
    )


_USERS_TAG = "user:"


def make_group(name: str, ranks: tuple[int, ...], spec: GroupSpec, store: Store) -> None:
    """Make, on this rank alone, a group that the other members have already.

    It lies in the same place of the store as the new backends that they give theirs at the same
    time, and is found by its name and ranks. Waits for them.
    """
    group, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(dist.get_rank()),
        list(ranks),
        dist.Backend(spec.backend),
        store,
        name,  # type: ignore[arg-type]
        timeout=timedelta(seconds=spec.timeout_s),
        pg_tag=spec.tag or None,
        group_desc=spec.description,
    )
    c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}


def default_group_store(store: Store) -> None:
    """Let groups made from here on meet in `store`."""
    world = c10d._world
    group = c10d._get_default_group()
    name = world.pg_names[group]
    world.pg_map[group] = (world.pg_map[group][0], PrefixStore(f"{name}/", store))


def default_name() -> str:
    """Return the default group's name; empty when there is none."""
    if not dist.is_initialized():
        return ""
    return str(c10d._world.pg_names[c10d._get_default_group()])


def watch_destroy(ended: Callable[[dist.ProcessGroup], None]) -> None:
    """Call `ended` with each group that a program has destroyed. On the main thread."""

    @functools.wraps(_native_destroy)
    def destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
        before = live_groups()
        _native_destroy(group)
        left = {live.group for live in live_groups()}
        for live in before:
            if live.group not in left:
                ended(live.group)

    modules: tuple[Any, ...] = (dist, c10d)
    for module in modules:
        module.destroy_process_group = destroy_process_group


_native_destroy: Callable[..., None] = dist.destroy_process_group


def destroy_groups() -> None:
    """Destroy all groups of this idle process. What somebody still holds keeps its name.

    A DeviceMesh asks for its groups by name: it must find the one that it was made with, which
    says that it is no more, and not a new one.
    """
    groups = live_groups()
    _native_destroy(None)
    for live in groups:
        # Weakly: it is forgotten when nothing holds it.
        _register_process_group(live.name, live.group)  # type: ignore[arg-type]
    c10d_logger._get_msg_dict = _describe_call


def _describe_call(func_name: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    # torch describes a call that has failed, for its log. Where the group is no more, that raises
    # in its turn, and hides why the call has failed.
    try:
        return _native_describe_call(func_name, *args, **kwargs)
    except ValueError:
        return {"func_name": func_name}


_native_describe_call: Callable[..., dict[str, Any]] = c10d_logger._get_msg_dict


def group_count() -> int:
    """Return the first number that no group has had for its name; ranks must agree on it."""
    return max(here.highest + 1, int(c10d._world.group_count))


def watch_names() -> None:
    """Remember the numbers of groups: torch begins at 0 again when all have been destroyed.

    What still knows one of those by its name must not find another.
    """
    c10d._process_group_name = here.name


class GroupNumbers:
    """The numbers that groups have for names, as torch's own function gives them.

    Attributes:
        highest: That a group of this process has had; -1 before the first.
    """

    def __init__(self, native: Callable[..., Any]) -> None:
        self.highest = -1
        self._native = native

    def note(self, number: int) -> None:
        """Note that groups have had numbers up to this one."""
        self.highest = max(self.highest, number)

    def name(self, *args: Any, **kwargs: Any) -> Any:
        """Return the name of a new group, and note its number; torch calls it."""
        name = self._native(*args, **kwargs)
        if name.isdecimal():
            self.note(int(name))
        return name


def set_group_count(count: int) -> None:
    """Set the number from which the next group's name is made."""
    here.note(count - 1)
    c10d._world.group_count = count


def _broken() -> list[str]:
    used = ["_world", "default_pg_timeout", "_new_process_group_helper", "_process_group_name"]
    broken = lacking(c10d, used, "c10d")
    books = ["pg_map", "pg_names", "pg_group_ranks", "pg_to_tag", "group_count"]
    broken += lacking(c10d._world, books, "_world")
    broken += lacking(c10d_logger, ["_get_msg_dict"], "c10d_logger")
    return broken


here = GroupNumbers(c10d._process_group_name)
