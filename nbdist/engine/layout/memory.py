"""The free memory of this rank: of the machine, or within the container's limit."""

from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
# Of cgroup versions 2 and 1: the limit, and the usage.
_LIMITS = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)


def free_bytes() -> int:
    """Return the bytes that can be taken before the machine, or the container, is full."""
    import psutil

    free = int(psutil.virtual_memory().available)
    return min([free, *_left_in_cgroup(_CGROUP)])


def _left_in_cgroup(folder: Path) -> list[int]:
    left = []
    for limit, used in _LIMITS:
        try:
            texts = [(folder / name).read_text().strip() for name in (limit, used)]
        except OSError:
            continue  # no such version here, or no limit of our own
        if all(text.isdigit() for text in texts):  # "max" is no limit
            left.append(max(0, int(texts[0]) - int(texts[1])))
    return left
