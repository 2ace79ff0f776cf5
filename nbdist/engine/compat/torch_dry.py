"""Private parts of torch for a world in which tensors have shapes alone, and groups answer nothing.

One of the modules that hold what nbdist uses of torch's private parts; see `torch_groups.py`. Tried
with torch 2.13.0 (CPU).
"""

import functools
import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import DTensor

from nbdist.engine.compat import torch_sharded
from nbdist.engine.compat.lacking import lacking


def check() -> list[str]:
    """Return what this torch lacks of what we use, in words; empty when all is there."""
    missing = lacking(dist, ("_compute_bucket_assignment_by_size",), "torch.distributed")
    missing += lacking(dist.Work, ("_source_rank",), "torch.distributed.Work")
    missing += lacking(torch._C, ("_swap_tensor_impl",), "torch._C")
    missing += lacking(_fsdp_param, ("_chunk_with_empty",), "torch.distributed.fsdp")
    missing += lacking(fake_tensor, ("is_fake",), "torch._subclasses.fake_tensor")
    missing += lacking(FakeTensor, ("fake_device",), "FakeTensor")
    missing += [] if "constant" in FakeTensor.__annotations__ else ["FakeTensor.constant is gone"]
    try:
        from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: F401
    except ImportError as error:
        missing.append(f"the fake process group has moved: {error}")
    return [f"torch {torch.__version__}: {what}" for what in missing]


@contextmanager
def fake_group(size: int, rank: int) -> Iterator[None]:
    """Have a default process group within the block, of which this process is one rank.

    Its collectives return at once, with what their outputs held before.
    """
    from torch.distributed import _meta_registrations
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # Numbers of collectives without memory are drawn: not of the program's own random numbers.
    _meta_registrations.random = random.Random()  # type: ignore[assignment]
    dist.init_process_group("fake", world_size=size, rank=rank, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        torch_sharded.forget_results()  # with the groups that end here


@contextmanager
def answered_sums() -> Iterator[None]:
    """Have `all_reduce` within the block give a future of its tensor, as a real group's does.

    That of torch's fake group is of nothing.
    """
    really = dist.all_reduce

    def all_reduce(tensor: Tensor, *args: Any, **keywords: Any) -> Any:
        work = really(tensor, *args, **keywords)
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result([tensor])
        return work and SimpleNamespace(get_future=lambda: future, wait=work.wait)

    dist.all_reduce = all_reduce
    try:
        yield
    finally:
        dist.all_reduce = really


def group_called(name: str) -> dist.ProcessGroup:
    """Return the process group that a functional collective names."""
    named: Any = name  # torch's type for it is of one version
    group: dist.ProcessGroup = dist.distributed_c10d._resolve_process_group(named)
    return group


@contextmanager
def fake_tensors() -> Iterator[FakeTensorMode]:
    """Have all new tensors without memory within the block, but for those of DeviceMeshes.

    A mesh asks its own tensors, of ranks, for their numbers. Of FSDP2's chunks those are made that
    it takes: two of a parameter, and not one for each rank of the world.
    """
    methods = {name: m for name, m in vars(DeviceMesh).items() if inspect.isfunction(m)}
    for name, method in methods.items():
        setattr(DeviceMesh, name, on_numbers(method))
    swap, torch.utils.swap_tensors = torch.utils.swap_tensors, _swap
    cut = _fsdp_param._chunk_with_empty
    _fsdp_param._chunk_with_empty = Chunks  # type: ignore[assignment]
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            yield mode
    finally:
        _fsdp_param._chunk_with_empty = cut
        torch.utils.swap_tensors = swap
        for name, method in methods.items():
            setattr(DeviceMesh, name, method)


class Chunks(Sequence[Tensor]):
    """What FSDP2's `_chunk_with_empty` returns, of which each is made when it is asked for."""

    def __init__(self, tensor: Tensor, num_chunks: int, dim: int) -> None:
        """Make none."""
        self._whole, self._count, self._dim = tensor, num_chunks, dim

    def __len__(self) -> int:
        """Return how many there are, the empty ones too."""
        return self._count

    def __getitem__(self, number: Any) -> Any:
        """Return one, a view unless it is empty."""
        size = self._whole.size(self._dim)
        each = -(-size // self._count)
        begin = each * range(self._count)[number]
        if begin >= size > 0:
            return self._whole.new_empty(0)
        return self._whole.narrow(self._dim, begin, min(each, size - begin))


def _swap(first: Tensor, second: Tensor) -> None:
    """Swap tensors as `torch.utils.swap_tensors` does, of which something may know by a weakref.

    `Module.to` swaps parameters without memory, and the mode that makes these knows each of them.
    """
    for name in ("__class__", "__dict__"):
        one, other = getattr(first, name), getattr(second, name)
        setattr(first, name, other)
        setattr(second, name, one)
    torch._C._swap_tensor_impl(first, second)


def on_numbers(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that makes tensors with numbers, also within `fake_tensors`."""

    @functools.wraps(method)
    def call(*args: Any, **keywords: Any) -> Any:
        with unset_fake_temporarily():
            return method(*args, **keywords)

    return call


def is_meta(tensor: Tensor) -> bool:
    """Return whether a tensor is on meta, without the operation by which a fake one answers."""
    own = getattr(tensor, "fake_device", None)
    return bool(tensor.is_meta if own is None else own.type == "meta")


def is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor has a storage of its own, as a DTensor has not."""
    return type(tensor) in (Tensor, FakeTensor, torch.nn.Parameter)


@contextmanager
def settled_pipelines() -> Iterator[None]:
    """Have a pipeline's stages not ask each other, within the block, whether shapes are known.

    They are: torch's answer is a number that a stage sends.
    """
    from torch.distributed.pipelining import schedules, stage

    kind: Any = schedules._PipelineSchedule
    modes = getattr(stage, "InferenceMode", None)
    ask = vars(kind).get("_warmup_p2p")
    if modes is None or ask is None:
        yield
        return

    def settle(_schedule: Any, stages: list[Any], *_: Any) -> None:
        for one in stages:
            one._inference_mode = modes.STATIC

    kind._warmup_p2p = settle
    try:
        yield
    finally:
        kind._warmup_p2p = ask


def has_number(tensor: Tensor) -> bool:
    """Return whether a tensor has numbers: a real one, or of one that `torch.tensor(3)` gives."""
    return getattr(tensor, "constant", None) is not None or not fake_tensor.is_fake(tensor)


def forget_number(tensor: Tensor) -> None:
    """Have a tensor without memory forget its number."""
    if isinstance(tensor, FakeTensor):
        tensor.constant = None


def know_number(tensor: Tensor, number: float) -> None:
    """Have a tensor without memory, of one element, know its number."""
    if isinstance(tensor, FakeTensor):
        with unset_fake_temporarily():
            tensor.constant = torch.full(tuple(tensor.shape), number, dtype=tensor.dtype)


def hear_any(source: Callable[[], Any]) -> None:
    """Have `source` say whom a `recv` from any rank has heard. Of this process, for good.

    torch asks first whether it is the rank itself, and in a group then for each rank.
    """
    dist.Work._source_rank = lambda _: source()  # type: ignore[method-assign,assignment]


def is_called_by(*names: str) -> bool:
    """Return whether a function of `torch.distributed` of such a name has led here."""
    frame = inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name in names and code.co_filename == dist.distributed_c10d.__file__:
            return True
        frame = frame.f_back
    return False


def is_of_parts(types: Sequence[type]) -> bool:
    """Return whether an operation is one of DTensors, which makes others of their parts.

    A mode that returns NotImplemented for it sees these, too.
    """
    return any(issubclass(one, DTensor) for one in types)


def ddp_buckets(tensors: list[Tensor], first_bytes: int, bytes: int) -> list[list[int]]:
    """Return which of the tensors DDP's reducer puts into each bucket, by their places."""
    buckets, _ = dist._compute_bucket_assignment_by_size(tensors, [first_bytes, bytes])
    return [list(bucket) for bucket in buckets]


@contextmanager
def resizes(after: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Have `after` called with each storage that is resized within the block, as by FSDP2."""
    kind: Any = torch.UntypedStorage
    resize = kind.resize_

    def noted(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        after(storage)
        return result

    kind.resize_ = noted
    try:
        yield
    finally:
        kind.resize_ = resize
