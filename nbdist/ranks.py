"""Read and write sets of ranks as people do: `all`, `0`, `0,2`, `1-3`."""

from collections.abc import Iterable

from nbdist.errors import UsageError

# What each rank finds in its namespace, of its own or put there by us: nobody else sets them.
NAMES_OF_A_RANK = frozenset(
    {"rank", "local_rank", "world_size", "device", "torch", "dist", "nbdist"},
)


def parse_ranks(text: str, world_size: int) -> tuple[int, ...]:
    """Return the ranks that `text` names, ascending and without repeats.

    Args:
        text: `all`, or ranks and ranges joined by commas, such as `0,2-3`.
        world_size: Number of ranks in the cluster; valid ranks are `0 .. world_size - 1`.

    Raises:
        UsageError: `text` is not of that form, or names a rank that does not exist.
    """
    if not isinstance(text, str):
        raise UsageError(f'Ranks are named by a text, "all", "0", "0,2" or "1-3", not {text!r}.')
    if text.strip() == "all":
        return tuple(range(world_size))
    chosen: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UsageError(f"RANKS is all, 0, 0,2 or 1-3, not {text!r}.")
        low, high = int(first), int(last) if dash else int(first)
        if low > high:
            raise UsageError(f"The range {part.strip()!r} runs backwards; write {high}-{low}.")
        if high >= world_size:
            # Named before they are counted: a slip of the keyboard may name a million million.
            raise UsageError(
                f"There is no rank {high}: this cluster has {name_ranks(range(world_size))}."
            )
        chosen.update(range(low, high + 1))
    return tuple(sorted(chosen))


def name_ranks(ranks: Iterable[int]) -> str:
    """Return ranks in words, runs joined: `rank 2`, `ranks 0-3`, `ranks 0, 2-3`."""
    ordered = sorted(set(ranks))
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank{'' if len(ordered) == 1 else 's'} {', '.join(parts)}"


def begin_with_ranks(ranks: Iterable[int], *, be: bool = False) -> str:
    """Return the beginning of a sentence: `Ranks 0-3`, with `be` `Ranks 0-3 are`."""
    chosen = set(ranks)
    name = name_ranks(chosen)
    verb = "" if not be else " is" if len(chosen) == 1 else " are"
    return name[0].upper() + name[1:] + verb
