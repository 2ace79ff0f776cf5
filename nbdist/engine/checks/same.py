"""`nbdist.same`: refuse to go on where ranks hold other values of what must be one.

Ranks exchange digests, and only where these differ, digests of the parts and the text of the first
part that does: for a vocabulary of a million words a few bytes travel.
"""

import hashlib
from collections.abc import Iterable, Mapping, Set
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from nbdist.shared import side
from nbdist.shared.errors import MismatchError, UsageError
from nbdist.shared.text import name_ranks

T = TypeVar("T")

_LONGEST = 100  # characters of a value that are shown


def same(value: T, name: str = "the value") -> T:
    """Return `value`, if all ranks hold an equal one; else raise, on all of them.

        labels = nbdist.same({name: i for i, name in enumerate(names)}, "labels")

    For what each rank has worked out by itself and training takes for one: label maps,
    vocabularies, splits, configurations. Dicts are equal with the same items and sets with the same
    elements, in any order; lists in their order. Collective. Main thread.

    Args:
        value: Numbers, text, arrays, tensors, and lists, tuples, sets, dicts and dataclasses of
            them.
        name: What the error calls it.

    Raises:
        MismatchError: Ranks hold other values: with the first part that differs, and what is there.
        UsageError: A part of it, on a rank, is of another kind, which cannot be compared.
    """
    side.require_rank("nbdist.same")
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    try:
        digest, refusal = digest_of(value), ""
    except TypeError as error:
        digest, refusal = b"", str(error)
    found = _gather((digest, refusal))
    if refused := next((said for _, said in found if said), ""):
        raise UsageError(refused, do="give what it is made of, or a text of it.")
    if len({digest for digest, _ in found}) > 1:
        raise _differs(value, name)
    return value


def _differs(value: Any, name: str) -> MismatchError:
    """Return the error of values that differ. Collective."""
    parts = _parts(value)
    digests = _gather({place: digest_of(part) for place, part in parts.items()})
    places = dict.fromkeys(place for of_rank in digests for place in of_rank)
    first = next((p for p in places if len({of.get(p) for of in digests}) > 1), "")
    texts = _gather(_text(parts[first]) if first in parts else "nothing" if first else _text(value))
    by_text: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        by_text.setdefault(text, []).append(rank)
    held = "; ".join(f"{text} on {name_ranks(ranks)}" for text, ranks in by_text.items())
    return MismatchError(
        f"Ranks hold other values of {name}.",
        why=f"{name}{first} is {held}.",
        do="work it out alike on all ranks (sorted names, one seed), or on rank 0, and send it: "
        "dist.broadcast_object_list.",
    )


def _gather(own: Any) -> list[Any]:
    every = [own] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return every


def _parts(value: Any) -> dict[str, Any]:
    """Return what a value is made of, by how code would name it; nothing of one that is whole."""
    if isinstance(value, Mapping):
        return {f"[{key!r}]": part for key, part in value.items()}
    if isinstance(value, list | tuple):
        return {f"[{i}]": part for i, part in enumerate(value)}
    return {f".{name}": part for name, part in _fields(value)}


def _fields(value: Any) -> list[tuple[str, Any]]:
    if not is_dataclass(value) or isinstance(value, type):
        return []
    return [(field.name, getattr(value, field.name)) for field in fields(value)]


def _text(value: Any) -> str:
    in_order = f"{{{', '.join(sorted(map(repr, value)))}}}" if isinstance(value, Set) else ""
    text = in_order or repr(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def digest_of(value: Any) -> bytes:
    """Return a digest that equal values share on any process.

    Raises:
        TypeError: A part of the value is of a kind that is not known.
    """
    if isinstance(value, bool | int | float | complex | str | bytes | type(None)):
        return _hashed(type(value).__name__, [repr(value).encode()])
    if isinstance(value, torch.Tensor):
        whole = value.detach().cpu().contiguous()
        about = f"tensor {whole.dtype} {tuple(whole.shape)}"
        return _hashed(about, [whole.reshape(-1).view(torch.uint8).numpy().tobytes()])
    if hasattr(value, "dtype") and hasattr(value, "tobytes"):  # numpy's arrays and numbers
        return _hashed(f"array {value.dtype} {value.shape}", [value.tobytes()])
    if isinstance(value, Mapping):
        items = [digest_of(key) + digest_of(part) for key, part in value.items()]
        return _hashed("dict", sorted(items))
    if isinstance(value, Set):
        return _hashed("set", sorted(map(digest_of, value)))
    if isinstance(value, list | tuple | range):
        return _hashed(type(value).__name__, map(digest_of, value))
    if of_fields := _fields(value):
        return _hashed(type(value).__qualname__, [digest_of(part) for _, part in of_fields])
    raise TypeError(f"nbdist.same cannot compare a {type(value).__name__} over ranks.")


def _hashed(kind: str, parts: Iterable[bytes]) -> bytes:
    made = hashlib.blake2b(kind.encode(), digest_size=16)
    for part in parts:
        made.update(len(part).to_bytes(8, "little"))
        made.update(part)
    return made.digest()
