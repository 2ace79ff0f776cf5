"""Modes in which a cell runs without numbers: what it calls is noted, what it decides is asked."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from nbdist.engine.compat import torch_dry
from nbdist.engine.compat.torch_hooks import reduction_of, unbox_group
from nbdist.engine.dry.collectives import functional_kind
from nbdist.engine.dry.rank_log import RankLog
from nbdist.engine.dry.unknown import NotKnownError, Unknown
from nbdist.engine.dry.values import Values
from nbdist.engine.tap.collective_check import DTYPES, REDUCTIONS
from nbdist.engine.tap.ops import CPU, OPS, Op, dtype_index, size_bytes
from nbdist.shared.collectives import COLLECTIVES

_EQUAL_AFTER = ("all_reduce", "broadcast", "all_gather")  # on all ranks of the group


class Calls(TorchDispatchMode):
    """Notes collectives and messages in a log, and what tensors hold.

    Args:
        log: Of this rank.
        values: Of its tensors.
        after: Called after each operation, with it, its arguments and its result.
    """

    def __init__(self, log: RankLog, values: Values, after: Callable[..., None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._log, self._values, self._after = log, values, after

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Carry out an operation, and note it."""
        kwargs = kwargs or {}
        if torch_dry.is_of_parts(types):
            return NotImplemented
        if func.namespace == "c10d":
            return self._call(func, args, kwargs)
        if func.namespace == "_c10d_functional":
            return self._functional(func, args, kwargs)
        result = func(*args, **kwargs)
        if func.namespace != "prim":  # asked for a device or a layout
            self._values.computed(func, args, kwargs, result)
            self._after(func, args, kwargs, result)
        return result

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        op = OPS.get(func.overloadpacket.__name__)
        if op is None or op.seen == "unseen":
            return func(*args, **kwargs)
        names = [one.name for one in func._schema.arguments]
        defaults = [one.default_value for one in func._schema.arguments]
        given = [
            args[n] if n < len(args) else kwargs.get(name, defaults[n])
            for n, name in enumerate(names)
        ]
        group = unbox_group(given[op.group_at])
        value = self._note(op, given, group)
        number = self._agreed(op, given, group)
        result = func(*args, **kwargs)
        outputs = [] if op.kind == "send" or op.payload_at is None else _leaves(given[0])
        for one in outputs:
            torch_dry.forget_number(one)
            if number is not None:
                torch_dry.know_number(one, number)
        self._values.write(outputs, value)
        self._after(func, args, kwargs, result)
        return result

    def _note(self, op: Op, given: list[Any], group: dist.ProcessGroup) -> int:
        ranks = dist.get_process_group_ranks(group)
        at = op.payload_at if op.same_at is None else op.same_at
        payload = None if at is None else given[at]
        root = op.root_at if op.root_at is not None else op.peer_at
        reduces = op.reduction_at is not None and COLLECTIVES[op.kind].reduces
        has_size = op.is_message or op.same in ("size and type", CPU)
        is_split = op.split is not None and bool(op.split(tuple(given), len(ranks)))
        return self._log.call(
            op.kind,
            group,
            count=_numbers_in(payload) if has_size and not is_split else 0,
            dtype=DTYPES[dtype_index(payload)] if payload is not None else "",
            reduction=_reduction(given[op.reduction_at or 0]) if reduces else "",
            peer=ranks[given[root]] if root is not None and given[root] >= 0 else -1,
            tag=given[op.tag_at] if op.tag_at is not None else 0,
            waits=_waits(op, given),
            is_equal=op.kind in _EQUAL_AFTER,
        )

    def _agreed(self, op: Op, given: list[Any], group: dist.ProcessGroup) -> float | None:
        """Return the number that a collective gives, where all ranks know theirs."""
        leaves = _leaves(given[0])
        if op.kind not in ("all_reduce", "broadcast") or [t.numel() for t in leaves] != [1]:
            return None
        own = leaves[0].item() if torch_dry.has_number(leaves[0]) else None
        every = self._log.exchange("number", group, own, waits=own is not None)
        if every is None or any(one is None for one in every):
            return None
        if op.kind == "broadcast":
            return float(every[given[op.root_at or 0]])
        return _reduced(_reduction(given[op.reduction_at or 0]), every)

    def _functional(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kind = functional_kind(func)
        if kind is None:
            result = func(*args, **kwargs)
            self._values.computed(func, args, kwargs, result)
            return result
        names = [one.name for one in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        group = torch_dry.group_called(given["group_name"])
        payload = args[0] if isinstance(args[0], Tensor) else list(args[0])
        value = self._log.call(
            kind,
            group,
            count=0 if kind == "all_to_all" else _numbers_in(payload),
            dtype=DTYPES[dtype_index(payload)],
            reduction=str(given.get("reduce_op", "")).upper(),
            waits=False,
            is_equal=kind in _EQUAL_AFTER,
        )
        result = func(*args, **kwargs)
        self._values.write(_leaves(result), value)
        self._after(func, args, kwargs, result)
        return result


def _leaves(payload: Any) -> list[Tensor]:
    if isinstance(payload, Tensor):
        return [payload]
    return [one for part in payload for one in _leaves(part)]


def _numbers_in(payload: Any) -> int:
    leaves = [] if payload is None else _leaves(payload)
    return size_bytes(payload) // leaves[0].element_size() if leaves else 0


def _reduction(argument: Any) -> str:
    return REDUCTIONS[reduction_of(argument)]


def _waits(op: Op, given: list[Any]) -> bool:
    if op.is_message:
        return torch_dry.is_called_by("send", "recv")
    return op.async_at is None or not given[op.async_at]


def _reduced(reduction: str, every: list[float]) -> float | None:
    if reduction in ("SUM", "AVG"):
        return sum(every) / (len(every) if reduction == "AVG" else 1)
    if reduction in ("MIN", "MAX"):
        return min(every) if reduction == "MIN" else max(every)
    return None


_ASKED = ("item", "__float__", "__int__", "__index__", "__bool__", "is_nonzero")
_WHOLE = ("equal", "allclose")


class Numbers(TorchFunctionMode):
    """Gives numbers that are not known where a tensor is asked for its own."""

    def __init__(self, log: RankLog, values: Values) -> None:
        self._log, self._values = log, values
        super().__init__()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Carry out a function of torch."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        one = args[0] if args and isinstance(args[0], Tensor) else None
        if one is not None and name in _ASKED and not torch_dry.has_number(one):
            return self._asked(name, one)
        if one is not None and name == "tolist" and not torch_dry.has_number(one):
            return self._listed(one, self._values.of(one), [*one.shape])
        if one is not None and name == "__format__" and not torch_dry.has_number(one):
            return "?"
        if one is not None and name in ("numpy", "__array__"):
            raise NotKnownError("numpy asks for the numbers of a tensor, and it has none here")
        if name in _WHOLE and one is not None:
            both = hash((name, *(self._values.of(t) for t in args if isinstance(t, Tensor))))
            return self._log.decide(both)
        if name in ("tensor", "as_tensor"):
            return self._made(func, args, kwargs)
        return self._with_numbers(func, args, kwargs)

    def _asked(self, name: str, tensor: Tensor) -> Any:
        if tensor.numel() != 1:
            raise RuntimeError(f"a Tensor with {tensor.numel()} elements cannot be converted")
        number = Unknown(self._values.of(tensor), self._log.decide)
        if name in ("__bool__", "is_nonzero"):
            return bool(number)
        return number if name == "item" else float(number)  # which raises

    def _listed(self, tensor: Tensor, value: int, sizes: list[int]) -> Any:
        if not sizes:
            return Unknown(value, self._log.decide)
        return [self._listed(tensor, hash((value, n)), sizes[1:]) for n in range(sizes[0])]

    def _made(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a tensor of plain values, also of some that are not known."""
        known: list[Unknown] = []
        data = _filled(args[0] if args else kwargs.get("data"), known)
        made = func(data, *args[1:], **kwargs) if args else func(**{**kwargs, "data": data})
        if isinstance(data, Tensor):
            return made
        text = "" if known else str(data)[:10_000]
        self._values.write([made], hash((text, *(one.value for one in known))))
        if known:
            torch_dry.forget_number(made)
        return made

    def _with_numbers(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = [one for one in (*args, *kwargs.values()) if isinstance(one, Unknown)]
        if not given:
            return func(*args, **kwargs)
        was = self._values.with_number
        self._values.with_number = tuple(one.value for one in given)
        try:
            args, kwargs = tree_map_only(Unknown, lambda _: 1.0, (args, kwargs))
            result = func(*args, **kwargs)
        finally:
            self._values.with_number = was
        if isinstance(result, torch.Tensor):
            torch_dry.forget_number(result)
        return result


def _filled(data: Any, found: list[Unknown]) -> Any:
    if isinstance(data, Unknown):
        found.append(data)
        return 1.0
    if isinstance(data, list | tuple):
        return [_filled(one, found) for one in data]
    return data
