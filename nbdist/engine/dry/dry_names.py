"""What stands in, in a dry cell, for functions that need peers, numbers, or a disk."""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

import nbdist
from nbdist.engine.compat import torch_dry, torch_modules
from nbdist.engine.data import alike
from nbdist.engine.dry import step
from nbdist.engine.dry.rank_log import RankLog
from nbdist.engine.dry.unknown import NotKnownError, Unknown
from nbdist.engine.dry.values import Values
from nbdist.engine.layout.axes.dry_reducer import DryBucket, DryReducer
from nbdist.engine.layout.layout import Layout, attach
from nbdist.engine.layout.plan import mesh
from nbdist.engine.layout.spread import spread
from nbdist.shared.errors import LayoutError

_QUIET = ("log", "keep", "publish", "coverage", "emulate_link")
_NOT_HERE = ("LocalSGD", "DiLoCo", "AsyncSGD", "from_pretrained", "init", "received_bytes")


class DryDDP(nn.Module):
    """`DistributedDataParallel`: its parameters broadcast, and gradients sent in its buckets.

    Args:
        module: The model.
        given: What else torch's takes, and changes nothing here.
        process_group: As of torch's.
        broadcast_buffers: As of torch's.
        find_unused_parameters: As of torch's.
        static_graph: As of torch's: parameters may go unused.
    """

    def __init__(
        self,
        module: nn.Module,
        *given: Any,
        process_group: Any = None,
        broadcast_buffers: bool = True,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        **_: Any,
    ) -> None:
        super().__init__()
        self.module = module
        self.require_backward_grad_sync = True
        self._finds_unused = find_unused_parameters or static_graph
        self._sends_buffers = self._sends_next = broadcast_buffers
        world: Any = dist.group.WORLD
        self._group = process_group or world
        self._broadcast([*module.parameters(), *module.buffers()])
        self._reducer = DryReducer(module, self._group, keeps_order=self._finds_unused)

    def _broadcast(self, tensors: Iterable[Any]) -> None:
        root = dist.get_process_group_ranks(self._group)[0]
        for tensor in tensors:
            dist.broadcast(tensor.detach(), root, group=self._group)

    def forward(self, *args: Any, **keywords: Any) -> Any:
        """Call the model; send buffers first if the forward before it trained, as torch does.

        Raises:
            RuntimeError: As torch does, the newest backward has left parameters out.
        """
        syncs = torch.is_grad_enabled() and self.require_backward_grad_sync
        if syncs and self._reducer.is_unfinished:
            raise RuntimeError(
                "Expected to have finished reduction in the prior iteration before starting a new "
                "one: parameters got no gradient (find_unused_parameters=True allows it)"
            )
        if self._sends_next:
            self._broadcast(self.module.buffers())
        outputs = self.module(*args, **keywords)
        self._sends_next = self._sends_buffers and syncs
        if torch.is_grad_enabled():
            self._reducer.expects = syncs
        if syncs and self._finds_unused:
            used = _leaves_below(outputs)
            for unused in (one for one in self._reducer.trained if id(one) not in used):
                self._reducer.ready(unused)
        return outputs

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Have gradients of forwards within the block not be sent."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before


def _leaves_below(outputs: Any) -> set[int]:
    """Return the ids of the parameters that outputs were computed from."""
    left = [one.grad_fn for one in tree_leaves(outputs) if isinstance(one, torch.Tensor)]
    seen, found = {None, *left}, set()
    while left:
        node: Any = left.pop()
        if node is not None:
            found.add(id(getattr(node, "variable", None)))
            new = {one for one, _ in node.next_functions} - seen
            seen |= new
            left += new
    return found


def parallelize(log: RankLog, values: Values, model: Any, layout: str, *policies: object) -> Layout:
    """Spread a model as `nbdist.parallelize` does, without proofs, which need numbers."""
    ranks_on_host = min(8, dist.get_world_size())
    shape = mesh.parse(layout, dist.get_world_size(), ranks_on_host)
    try:
        asked = step.policies_of(policies, shape, ranks_on_host)
    except LayoutError as error:
        raise NotKnownError(f"{error.what} {error.why}") from error
    made = torch_modules.uncompiled(model if isinstance(model, nn.Module) else model())
    result = spread(made, shape, asked)
    if {axis for axis, size in shape.axes.items() if size > 1} <= {"dp"}:
        values.write([*made.parameters(), *made.buffers()], hash("rank 0's"))
    attach(result)
    log.notes.update(step.notes_of(shape))
    if asked.compress is not None and asked.compress.method == "powersgd":
        log.notes.add("calls of turns that are left out are those before PowerSGD's start")
    return result


def _call_of_all(log: RankLog, name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that all ranks call together."""

    def call(*args: Any, **keywords: Any) -> Any:
        group = dist.group.WORLD
        assert group is not None
        value = log.call(name, group, is_equal=True)
        return answer(value, *args, **keywords)

    return call


def _objects(log: RankLog) -> dict[str, Callable[..., Any]]:
    """Return the collectives of objects, which ranks really exchange."""

    def group_of(group: Any) -> Any:
        return group if group is not None else dist.group.WORLD

    def root_of(group: Any, root: int | None, in_group: int | None) -> tuple[int, int]:
        ranks = dist.get_process_group_ranks(group)
        at = in_group if in_group is not None else ranks.index(root or 0)
        return at, ranks[at]

    def broadcast_object_list(
        objects: list[Any],
        src: int | None = None,
        group: Any = None,
        device: Any = None,
        group_src: int | None = None,
    ) -> None:
        at, root = root_of(group := group_of(group), src, group_src)
        log.call("broadcast_object_list", group, peer=root)
        every = log.exchange("objects", group, list(objects) if dist.get_rank() == root else None)
        objects[:] = (every or [])[at]

    def all_gather_object(objects: list[Any], obj: Any, group: Any = None) -> None:
        log.call("all_gather_object", group := group_of(group))
        objects[:] = log.exchange("objects", group, obj) or []

    def gather_object(
        obj: Any,
        object_gather_list: list[Any] | None = None,
        dst: int | None = None,
        group: Any = None,
        group_dst: int | None = None,
    ) -> None:
        _, root = root_of(group := group_of(group), dst, group_dst)
        log.call("gather_object", group, peer=root)
        every = log.exchange("objects", group, obj)
        if object_gather_list is not None and dist.get_rank() == root:
            object_gather_list[:] = every or []

    def scatter_object_list(
        out: list[Any],
        objects: list[Any] | None = None,
        src: int | None = None,
        group: Any = None,
        group_src: int | None = None,
    ) -> None:
        at, root = root_of(group := group_of(group), src, group_src)
        log.call("scatter_object_list", group, peer=root)
        every = log.exchange("objects", group, objects if dist.get_rank() == root else None)
        out[0] = (every or [])[at][dist.get_group_rank(group, dist.get_rank())]

    return {
        one.__name__: one
        for one in (broadcast_object_list, all_gather_object, gather_object, scatter_object_list)
    }


def install(log: RankLog, values: Values) -> None:
    """Put them in place. Of this process, for good."""
    make_group = dist.new_group

    @functools.wraps(make_group)
    def new_group(*args: Any, **keywords: Any) -> Any:
        if not keywords.get("use_local_synchronization"):
            log.call("new_group", dist.group.WORLD)  # type: ignore[arg-type]
        return make_group(*args, **keywords)

    def monitored_barrier(group: Any = None, *_: Any, **__: Any) -> None:
        world: Any = dist.group.WORLD
        log.call("monitored_barrier", group or world)  # the fake group has none

    receive = dist.recv

    def recv(tensor: torch.Tensor, src: int | None = None, *more: Any, **keywords: Any) -> Any:
        heard = receive(tensor, src, *more, **keywords)
        is_any = src is None and keywords.get("group_src") is None
        return Unknown(values.random(), log.decide) if is_any else heard

    def some_source() -> Unknown:
        answers = iter((False, True))
        return Unknown(0, lambda _: next(answers))

    torch_dry.hear_any(some_source)
    for name, one in {
        **_objects(log),
        "recv": recv,
        "new_group": new_group,
        "monitored_barrier": monitored_barrier,
    }.items():
        setattr(dist, name, one)
        setattr(dist.distributed_c10d, name, one)
    for place in (nn.parallel, nn.parallel.distributed):
        place.DistributedDataParallel = DryDDP  # type: ignore
    really_seed = torch.manual_seed

    def manual_seed(seed: int) -> torch.Generator:
        values.seed(seed)
        return really_seed(seed)

    torch.manual_seed = torch.random.manual_seed = manual_seed
    _let_reducers_say_what_is_equal(values)
    torch.save = lambda *_, **__: None
    alike.digests = lambda *_: {}
    stand_ins: dict[str, Any] = {
        "parallelize": functools.partial(parallelize, log, values),
        "save": _call_of_all(log, "nbdist.save", lambda *_, **__: None),
        "restore": _call_of_all(log, "nbdist.restore", lambda *_, **__: None),
        "same": _call_of_all(log, "nbdist.same", lambda _value, given, *_: given),
        "mean": _call_of_all(log, "nbdist.mean", lambda value, *_: Unknown(value, log.decide)),
    }
    stand_ins |= {name: lambda *_, **__: None for name in _QUIET}
    stand_ins |= {name: functools.partial(_refuse, name) for name in _NOT_HERE}
    for name, one in stand_ins.items():
        setattr(nbdist, name, one)


def _let_reducers_say_what_is_equal(values: Values) -> None:
    """Have gradients be equal behind a bucket, which a dry reducer does not copy.

    Also one that a hook averages by several calls.
    """
    send, sent = DryReducer._send, itertools.count()

    def send_and_say(reducer: DryReducer, bucket: DryBucket) -> None:
        send(reducer, bucket)
        grads = [one.grad for one in reducer.trained if one.grad is not None]
        values.write(grads, hash(("averaged", reducer.group.group_name, next(sent))))

    DryReducer._send = send_and_say  # type: ignore[method-assign,assignment]


def _refuse(name: str, *_: Any, **__: Any) -> None:
    raise NotKnownError(f"nbdist.{name} is not followed")
