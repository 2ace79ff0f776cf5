"""The rank's side of `%dist push` and `%dist pull`: names in the user's namespace.

Values travel pickled (protocol 5) with arrays and tensors out of band, as raw buffers that are
never copied into the pickle. See `nbdist/shared/payload.py`.
"""

from typing import Any

from nbdist.shared import payload


def push(buffers: list[memoryview], names: list[str]) -> tuple[None, list[Any]]:
    """Set `names` in this rank's namespace to the values in `buffers`. On the main thread."""
    from nbdist.engine.rank.rank import this_rank

    values = payload.unpack(buffers)
    this_rank().kernel.shell.user_ns.update(zip(names, values, strict=True))
    return None, []


def pull(buffers: list[memoryview], name: str) -> tuple[None, list[Any]]:
    """Return the value of `name` on this rank, as buffers. On the main thread.

    Raises:
        NameError: There is no such name.
        TransferError: The value cannot be pickled.
    """
    from nbdist.engine.rank.rank import this_rank

    namespace = this_rank().kernel.shell.user_ns
    if name not in namespace:
        raise NameError(f'there is no variable "{name}"')
    return None, payload.pack(namespace[name])
