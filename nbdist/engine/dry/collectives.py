"""What a rank sends, collective by collective, as seen at the dispatcher."""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nbdist.engine.compat import torch_dry
from nbdist.engine.compat.torch_hooks import unbox_group
from nbdist.engine.tap.ops import OPS, size_bytes

# Functional collectives by the name of their operator.
_FUNCTIONAL = {
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "broadcast_": "broadcast",
}


def functional_kind(func: Any) -> str | None:
    """Return the kind of a functional collective; None of another operation."""
    return _FUNCTIONAL.get(func.overloadpacket.__name__)


@dataclass(frozen=True, slots=True)
class Call:
    """One collective, as one rank launches it.

    Attributes:
        kind: As in `nbdist.shared.collectives`.
        nbytes: What this rank puts in.
        ranks: Of its group, in the world.
    """

    kind: str
    nbytes: int
    ranks: tuple[int, ...]


class CollectiveLog(TorchDispatchMode):
    """Notes each collective of this thread.

    Attributes:
        calls: In order.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Note an operation that is a collective, and carry it out."""
        if torch_dry.is_of_parts(types):
            return NotImplemented
        if func.namespace == "c10d":
            self._note_call(func, args, kwargs or {})
        elif func.namespace == "_c10d_functional":
            self._note_functional(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _note_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        op = OPS.get(func.overloadpacket.__name__)
        if op is None or op.seen == "unseen" or not (op.sends or op.is_message):
            return
        rest = func._schema.arguments[len(args) :]
        given = [*args, *(kwargs[one.name] for one in rest if one.name in kwargs)]
        at = op.payload_at if op.sends else None
        payload = 0 if at is None else size_bytes(given[at])
        self._add(op.kind, payload, unbox_group(given[op.group_at]))

    def _note_functional(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kind = functional_kind(func)
        if kind is None:
            return
        sent = args[0] if isinstance(args[0], Tensor) else list(args[0])
        names = [one.name for one in func._schema.arguments]
        group = (dict(zip(names, args, strict=False)) | kwargs)["group_name"]
        self._add(kind, size_bytes(sent), torch_dry.group_called(group))

    def _add(self, kind: str, nbytes: int, group: dist.ProcessGroup) -> None:
        self.calls.append(Call(kind, nbytes, tuple(dist.get_process_group_ranks(group))))
