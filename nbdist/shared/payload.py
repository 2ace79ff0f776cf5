"""Turn any object into buffers and back, arrays and tensors without an extra copy.

Pickle protocol 5 takes large buffers out of band. numpy arrays do that by themselves; torch
tensors are reduced here to their bytes, dtype and shape, wherever in a structure they stand, so
that bfloat16 and tensors deep inside a state dict travel raw as well. Functions and classes
made in a notebook, lambdas and local ones go by value, through cloudpickle where it is installed.

torch is never imported by packing. Unpacking a tensor does import it.
"""

import io
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import Any

from nbdist.shared.error_text import text_of
from nbdist.shared.errors import TransferError


class _Pickler(pickle.Pickler):
    """A pickler that sends tensors as raw buffers, and what no module names by value."""

    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            return _reduce_tensor(torch, value)
        if _has_no_place(value):
            return _reduce_by_value(value)
        return NotImplemented


def pack(value: Any) -> list[Any]:
    """Return `value` as buffers: the pickle first, then its raw parts.

    Raises:
        TransferError: Something in it cannot be pickled; the text says what.
    """
    parts: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    try:
        _Pickler(stream, protocol=5, buffer_callback=parts.append).dump(value)
    except Exception as error:
        raise TransferError(
            f"A {type(value).__name__} cannot be sent: {text_of(error)}",
            do="send what it is made of (state_dict, arrays, numbers), or make it on the ranks.",
        ) from error
    return [stream.getvalue(), *(part.raw() for part in parts)]


def unpack(buffers: Sequence[Any]) -> Any:
    """Return the value that `pack` was given. Arrays and tensors are writable copies."""
    first, *parts = buffers
    # A received buffer is read-only and shared with the message; users expect to write.
    return pickle.loads(bytes(first), buffers=[bytearray(part) for part in parts])


def _reduce_tensor(torch: Any, tensor: Any) -> Any:
    """Reduce a tensor to its bytes; CUDA tensors arrive on the CPU.

    Other subclasses and sparse ones are left to torch's own pickling.

    Raises:
        TransferError: It is a DTensor, which means nothing outside its mesh.
    """
    if hasattr(tensor, "full_tensor"):
        raise TransferError(
            "a DTensor is only this rank's shard; send x.full_tensor() or x.to_local()."
        )
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
        return NotImplemented
    flat = tensor.detach().cpu().contiguous()
    raw = pickle.PickleBuffer(flat.reshape(-1).view(torch.uint8).numpy())
    dtype = str(tensor.dtype).removeprefix("torch.")
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    arguments = (raw, dtype, tuple(tensor.shape), bool(tensor.requires_grad), is_parameter)
    return rebuild_tensor, arguments


def rebuild_tensor(
    raw: Any, dtype: str, shape: tuple[int, ...], requires_grad: bool, is_parameter: bool
) -> Any:
    """Return a CPU tensor over `raw`, without a copy; the kernel gets torch here, and only here.

    Args:
        raw: A writable buffer of exactly the tensor's bytes, in C order.
        dtype: Name of the torch dtype, such as `bfloat16`.
        shape: Its shape.
        requires_grad: Whether it asks for gradients.
        is_parameter: Whether it was an `nn.Parameter`.
    """
    import torch

    kind = getattr(torch, dtype)
    if len(raw) == 0:
        tensor = torch.empty(shape, dtype=kind)
    else:
        tensor = torch.frombuffer(raw, dtype=torch.uint8).view(kind).reshape(shape)
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)


def _has_no_place(value: Any) -> bool:
    """Return whether a function or class is of the notebook, or of none that a module names."""
    is_code = isinstance(value, type) or (callable(value) and hasattr(value, "__code__"))
    if not is_code:
        return False
    return getattr(value, "__module__", None) == "__main__" or "<" in value.__qualname__


def _reduce_by_value(value: Any) -> Any:
    """Send a function or class of the notebook by value: the other side has no such module."""
    try:
        import cloudpickle
    except ImportError as error:
        raise TransferError(
            f"{value.__qualname__} is of no module, and cloudpickle is not installed."
        ) from error
    loads: Callable[[bytes], Any] = cloudpickle.loads
    return loads, (cloudpickle.dumps(value),)
