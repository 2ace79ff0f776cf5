"""The table of c10d operators, with the way the tap carries out each.

An operator is *timed* (its launch and its end are seen), *counted* (its launch is seen: on CUDA
all timed operators are, where the end of a launch on the host is not the end of the work) or
*unseen* (torch's own kernel runs and the tap knows nothing). `tests/group/test_tap.py` fails when
the installed torch has an operator that this table does not name.

Each operator is carried out through the Python binding of the group's backend, which releases
the GIL. Calling torch's kernel of the operator from Python (`call_boxed`) keeps it, and then
deadlocks with the completion callbacks, which run on gloo's threads and need it.

The launching functions take the operator's arguments in the schema's order, the reduction as a
number; trailing arguments that have their default may be left out by the dispatcher.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any, Literal

import torch
from torch._C import _distributed_c10d as c10d

from nbdist.engine.compat.torch_hooks import (
    finished_work,
    is_over_gloo,
    keep_uncompiled,
    reduce_op,
    unbox_group,
)
from nbdist.engine.tap import collective_check
from nbdist.shared.errors import ClusterError

Returns = Literal["outputs and work", "work", "nothing"]
# What must be the same on all ranks, beside kind, root and reduction.
Same = Literal["size and type", "size and type on cpu", "type"]
CPU: Same = "size and type on cpu"


@dataclass(frozen=True, slots=True)
class Op:
    """One operator.

    `launch(backend, *arguments)` starts it and returns its Work. `group_at`, `async_at` and
    `payload_at` are positions of arguments; without `async_at` the caller decides later whether
    it waits. The payload is what this rank puts in, or takes out where `sends` is False. An
    operator without `launch` is unseen.

    `same` says what of the tensors at `same_at` (by default the payload) must be equal on all
    ranks; NCCL allows different sizes where gloo does not. `root_at` and `reduction_at` are
    positions too, `peer_at` and `tag_at` those of a message's other rank and its tag.

    `split(arguments, ranks)` returns the bytes to each rank of the group and then from each: none
    where no splits are given, None where the backend refuses them.

    `prepare(backend, *arguments)` splits gloo's operator into steps on the CPU; it returns None
    where that is not possible: then `launch` is called.
    """

    seen: Literal["timed", "unseen"]
    kind: str
    launch: Callable[..., Any] | None = None
    returns: Returns = "work"
    group_at: int = 1
    async_at: int | None = None
    payload_at: int | None = 0
    sends: bool = True
    same: Same = "size and type"
    same_at: int | None = None
    root_at: int | None = None
    reduction_at: int | None = None
    peer_at: int | None = None
    tag_at: int | None = None
    prepare: Callable[..., "Prepared | None"] | None = None
    split: Callable[[tuple[Any, ...], int], Sequence[int] | None] | None = None

    @property
    def is_message(self) -> bool:
        """Return whether it goes from one rank to one other."""
        return self.kind in ("send", "recv")


# ProcessGroupGloo copies tensors of collectives to the host; of messages it hands their address to
# writev(2), which fails with EFAULT, and the process ends by SIGABRT (torch 2.11).
WHY_NO_MESSAGES = "gloo sends a message from the host's memory, and cannot read or write a GPU's"


def refuse_message(kind: str, device_type: str, *, over_gloo: bool) -> None:
    """Refuse a message that would end this process: of a tensor on a GPU, over gloo.

    Raises:
        ClusterError: It is one. Nothing was sent.
    """
    if device_type == "cuda" and over_gloo:
        raise ClusterError(
            f"A {kind} of a tensor on the GPU was refused, for this group's backend is gloo.",
            why=f"{WHY_NO_MESSAGES}: torch would end this rank",
            do="send and receive tensors on the CPU (tensor.cpu()), or use a collective such as "
            "dist.broadcast; with a GPU for each rank nccl sends them",
        )


def refusing(op: Op, device_type: str) -> Callable[..., Any]:
    """Return the function that sends a message where the tap is off, or refuses it."""
    launch, kind, group_at, device = op.launch, op.kind, op.group_at, torch.device(device_type)
    assert launch is not None

    def kernel(*args: Any) -> Any:
        backend = unbox_group(args[group_at])._get_backend(device)
        refuse_message(kind, device_type, over_gloo=is_over_gloo(backend))
        return (launch(backend, *args) or finished_work()).boxed()

    keep_uncompiled(kernel)
    return kernel


@dataclass(frozen=True, slots=True)
class Prepared:
    """An operator that gloo makes of another one: copies, then the operation, then copies.

    `launch()` starts the operation, `finish()` copies the result out when it is over.
    """

    launch: Callable[[], Any]
    finish: Callable[[], object]


_DTYPES = {getattr(torch, name, None): i for i, name in enumerate(collective_check.DTYPES) if name}


def describer(op: Op, device_type: str) -> Callable[[tuple[Any, ...], int], tuple[int, int]]:
    """Return a function that gives `call` and `size` of `collective_check` for a call.

    Its arguments: the operator's, with the reduction as a number, and the payload's bytes. Messages
    are not announced. It is called with each collective.
    """
    base = 0 if op.is_message else collective_check.pack(op.kind)
    root_at, reduction_at = op.root_at, op.reduction_at
    same_at = op.payload_at if op.same_at is None else op.same_at
    is_payload = same_at == op.payload_at
    with_size = op.same == "size and type" or (op.same == CPU and device_type == "cpu")

    dtypes, roots, types = _DTYPES, collective_check.ROOT, collective_check.DTYPE
    reductions = collective_check.REDUCTION

    def describe(args: tuple[Any, ...], payload_bytes: int) -> tuple[int, int]:
        call, size = base, 0
        if root_at is not None:
            call += roots * (args[root_at] + 1)
        if reduction_at is not None:
            call += reductions * args[reduction_at]
        if same_at is not None:
            tensor = args[same_at]
            if with_size:
                size = payload_bytes if is_payload else size_bytes(tensor)
            while tensor.__class__ is list and tensor:  # as `dtype_index`, without a call
                tensor = tensor[0]
            call += types * dtypes.get(getattr(tensor, "dtype", None), 0)
        return call, size

    return describe


def dtype_index(payload: Any) -> int:
    """Return the type of a tensor, or of the first of many in lists, as its place in `DTYPES`."""
    while payload.__class__ is list and payload:
        payload = payload[0]
    return _DTYPES.get(getattr(payload, "dtype", None), 0)


def size_bytes(payload: Any) -> int:
    """Return the bytes of a tensor, or of tensors in lists."""
    if isinstance(payload, torch.Tensor):
        return payload.nbytes
    if len(payload) == 1 and isinstance(payload[0], torch.Tensor):  # most are
        return payload[0].nbytes
    total = 0
    for part in payload:
        total += part.nbytes if isinstance(part, torch.Tensor) else size_bytes(part)
    return total


def _new_options(kind: type[Any], is_async: bool, timeout_ms: int, **fields: Any) -> Any:
    options = kind()
    options.asyncOp = is_async
    if timeout_ms > 0:
        options.timeout = timedelta(milliseconds=timeout_ms)
    for name, value in fields.items():
        setattr(options, name, value)
    return options


def _new_reducing(kind: type[Any], op: int, is_async: bool, timeout_ms: int, **fields: Any) -> Any:
    return _new_options(kind, is_async, timeout_ms, reduceOp=reduce_op(op), **fields)


# A loop asks for the same ones at each step, and backends only read them.
_options = lru_cache(maxsize=256)(_new_options)
_reducing = lru_cache(maxsize=256)(_new_reducing)


def _allreduce(
    b: Any, tensors: Any, _: Any, op: Any, sparse: Any, a: bool = True, t: int = -1
) -> Any:
    if sparse is None:
        return b.allreduce(tensors, _reducing(c10d.AllreduceOptions, op, a, t))
    options = _new_reducing(c10d.AllreduceOptions, op, a, t)
    options.sparseIndices = sparse
    return b.allreduce(tensors, options)


def _allreduce_coalesced(b: Any, tensors: Any, _: Any, op: Any, a: bool = True, t: int = -1) -> Any:
    return b.allreduce_coalesced(tensors, _reducing(c10d.AllreduceCoalescedOptions, op, a, t))


def _broadcast(
    b: Any, tensors: Any, _: Any, root: int, part: int, a: bool = True, t: int = -1
) -> Any:
    return b.broadcast(
        tensors, _options(c10d.BroadcastOptions, a, t, rootRank=root, rootTensor=part)
    )


def _reduce(
    b: Any, tensors: Any, _: Any, op: Any, root: int, part: int, a: bool = True, t: int = -1
) -> Any:
    return b.reduce(
        tensors,
        _reducing(c10d.ReduceOptions, op, a, t, rootRank=root, rootTensor=part),
    )


def _allgather(b: Any, outputs: Any, inputs: Any, _: Any, a: bool = True, t: int = -1) -> Any:
    return b.allgather(outputs, inputs, _options(c10d.AllgatherOptions, a, t))


def _allgather_coalesced(b: Any, outputs: Any, inputs: Any, _: Any, a: bool = True) -> Any:
    return b.allgather_coalesced(outputs, inputs, _options(c10d.AllgatherOptions, a, -1))


def _allgather_base(b: Any, output: Any, input: Any, _: Any, a: bool = True, t: int = -1) -> Any:
    return b._allgather_base(output, input, _options(c10d.AllgatherOptions, a, t))


def _reduce_scatter(
    b: Any, outputs: Any, inputs: Any, _: Any, op: Any, a: bool = True, t: int = -1
) -> Any:
    return b.reduce_scatter(outputs, inputs, _reducing(c10d.ReduceScatterOptions, op, a, t))


def _reduce_scatter_base(
    b: Any, output: Any, input: Any, _: Any, op: Any, a: bool = True, t: int = -1
) -> Any:
    return b._reduce_scatter_base(output, input, _reducing(c10d.ReduceScatterOptions, op, a, t))


def _prepare_reduce_scatter(
    b: Any, output: Any, input: Any, _: Any, op: Any, a: bool = True, t: int = -1
) -> Prepared | None:
    """Split a reduce-scatter into the steps that gloo makes: copy, all_reduce, copy out."""
    n, count = b.size(), output.numel()
    if count == 0 or input.numel() != n * count or output.dtype != input.dtype:
        return None  # gloo raises its own error
    buffer = input.clone(memory_format=torch.contiguous_format)
    mine = buffer.view(n, count)[b.rank()].view(output.shape)
    options = _reducing(c10d.AllreduceOptions, op, a, t)
    return Prepared(lambda: b.allreduce([buffer], options), lambda: output.copy_(mine))


def _prepare_reduce_scatter_pair(
    b: Any, outputs: Any, inputs: Any, _: Any, op: Any, a: bool = True, t: int = -1
) -> Prepared | None:
    if len(inputs) != 1:
        return None
    return _prepare_reduce_scatter(b, outputs[0], inputs[0], _, op, a, t)


def _gather(
    b: Any, outputs: Any, inputs: Any, _: Any, root: int, a: bool = True, t: int = -1
) -> Any:
    return b.gather(outputs, inputs, _options(c10d.GatherOptions, a, t, rootRank=root))


def _scatter(
    b: Any, outputs: Any, inputs: Any, _: Any, root: int, a: bool = True, t: int = -1
) -> Any:
    return b.scatter(outputs, inputs, _options(c10d.ScatterOptions, a, t, rootRank=root))


def _alltoall(b: Any, outputs: Any, inputs: Any, _: Any, a: bool = True, t: int = -1) -> Any:
    return b.alltoall(outputs, inputs, _options(c10d.AllToAllOptions, a, t))


def _alltoall_base(
    b: Any,
    output: Any,
    input: Any,
    _: Any,
    out_sizes: Any,
    in_sizes: Any,
    a: bool = True,
    t: int = -1,
) -> Any:
    return b.alltoall_base(output, input, out_sizes, in_sizes, _options(c10d.AllToAllOptions, a, t))


def _split_lists(args: tuple[Any, ...], ranks: int) -> Sequence[int] | None:
    outputs, inputs = args[0], args[1]
    if len(outputs) != ranks or len(inputs) != ranks:
        return None
    return [tensor.nbytes for tensor in (*inputs, *outputs)]


def _split_by_sizes(args: tuple[Any, ...], ranks: int) -> Sequence[int] | None:
    output, input, _, out_sizes, in_sizes = args[:5]
    if not out_sizes and not in_sizes:
        return ()
    to, source = _part_bytes(input, in_sizes, ranks), _part_bytes(output, out_sizes, ranks)
    return None if to is None or source is None else to + source


def _part_bytes(tensor: torch.Tensor, sizes: Sequence[int], ranks: int) -> list[int] | None:
    if not sizes:
        return [tensor.nbytes // ranks] * ranks
    if len(sizes) != ranks or min(sizes) < 0 or (sum(sizes),) != tensor.shape[:1]:
        return None
    row_bytes = tensor.nbytes // max(tensor.shape[0], 1)
    return [rows * row_bytes for rows in sizes]


def _send(b: Any, tensors: Any, _: Any, to: int, tag: int) -> Any:
    return b.send(tensors, to, tag)


def _recv(b: Any, tensors: Any, _: Any, source: int, tag: int) -> Any:
    return b.recv(tensors, source, tag)


def _recv_any(b: Any, tensors: Any, _: Any, tag: int) -> Any:
    return b.recv_anysource(tensors, tag)


def _barrier(b: Any, _tensor: Any, _: Any, devices: Any, a: bool = True, t: int = -1) -> Any:
    return b.barrier(_new_options(c10d.BarrierOptions, a, t, device_ids=devices))


def _monitored_barrier(
    b: Any, _tensor: Any, _: Any, _devices: Any, t: int, all_ranks: bool
) -> None:
    b.monitored_barrier(timedelta(milliseconds=t), all_ranks)


def _allgather_coalesced_bases(
    b: Any, outputs: Any, inputs: Any, _: Any, is_async: bool = True
) -> Any:
    """Gather pair by pair: the backends' Python bindings lack the operator itself."""
    pairs = zip(outputs, inputs, strict=True)
    return _last([_allgather_base(b, out, part, _, is_async) for out, part in pairs])


def _reduce_scatter_coalesced_bases(
    b: Any, outputs: Any, inputs: Any, _: Any, op: Any, is_async: bool = True, timeout_ms: int = -1
) -> Any:
    pairs = zip(outputs, inputs, strict=True)
    return _last(
        [_reduce_scatter_base(b, out, part, _, op, is_async, timeout_ms) for out, part in pairs]
    )


def _last(works: list[Any]) -> Any:
    # A single pair, as DTensor sends it, stays asynchronous. Of several all but the last are
    # waited for here: one Work is all that can be returned, and it must not claim too much.
    for work in works[:-1]:
        work.wait()
    return works[-1]


OUTPUTS: Returns = "outputs and work"

OPS: dict[str, Op] = {
    "allreduce_": Op("timed", "all_reduce", _allreduce, OUTPUTS, async_at=4, reduction_at=2),
    "allreduce_coalesced_": Op(
        "timed", "all_reduce", _allreduce_coalesced, async_at=3, reduction_at=2
    ),
    "broadcast_": Op("timed", "broadcast", _broadcast, OUTPUTS, async_at=4, root_at=2),
    "reduce_": Op("timed", "reduce", _reduce, async_at=5, root_at=3, reduction_at=2),
    "allgather_": Op("timed", "all_gather", _allgather, OUTPUTS, 2, 3, 1, same=CPU),
    "allgather_coalesced_": Op(
        "timed", "all_gather", _allgather_coalesced, "work", 2, 3, 1, same=CPU
    ),
    "_allgather_base_": Op("timed", "all_gather", _allgather_base, OUTPUTS, 2, 3, 1),
    "allgather_into_tensor_coalesced_": Op(
        "timed", "all_gather", _allgather_coalesced_bases, "work", 2, 3, 1
    ),
    "reduce_scatter_": Op(
        "timed", "reduce_scatter", _reduce_scatter, OUTPUTS, 2, 4, 1, reduction_at=3
    ),
    "_reduce_scatter_base_": Op(
        *("timed", "reduce_scatter", _reduce_scatter_base, OUTPUTS, 2, 4, 1),
        reduction_at=3,
        prepare=_prepare_reduce_scatter,
    ),
    "reduce_scatter_tensor_coalesced_": Op(
        *("timed", "reduce_scatter", _reduce_scatter_coalesced_bases, "work", 2, 4, 1),
        reduction_at=3,
        prepare=_prepare_reduce_scatter_pair,
    ),
    "gather_": Op("timed", "gather", _gather, "work", 2, 4, 1, same=CPU, root_at=3),
    # Only the root puts something in; all take something out.
    "scatter_": Op("timed", "scatter", _scatter, OUTPUTS, 2, 4, 1, same=CPU, same_at=0, root_at=3),
    "alltoall_": Op("timed", "all_to_all", _alltoall, OUTPUTS, 2, 3, 1, split=_split_lists),
    "alltoall_base_": Op(
        "timed", "all_to_all", _alltoall_base, "work", 2, 5, 1, split=_split_by_sizes
    ),
    "send": Op("timed", "send", _send, peer_at=2, tag_at=3),
    "recv_": Op("timed", "recv", _recv, sends=False, peer_at=2, tag_at=3),
    "recv_any_source_": Op("timed", "recv", _recv_any, sends=False, tag_at=2),
    "barrier": Op("timed", "barrier", _barrier, async_at=3, payload_at=None),
    "monitored_barrier_": Op(
        "timed", "monitored_barrier", _monitored_barrier, "nothing", payload_at=None
    ),
    # Of torch 2.15, whose gather of one tensor has not been tried here.
    "gather_into_tensor_": Op("unseen", "gather", None, "nothing"),
    # No collective: looks for NaN in a tensor before one, on CUDA.
    "check_for_nan": Op("unseen", "check_for_nan", None, "nothing"),
}
