"""What collectives move: bandwidth as nccl-tests reports it, and bytes on the wire. Closed forms.

`bytes` is what one rank puts in, throughout (of a broadcast or a scatter, what its root does), and
`n` the ranks of the group.
"""

from nbdist.errors import UsageError

# Times bytes: nccl-tests counts what all ranks together hold of a gathered buffer.
_TOTAL = {"all_gather", "gather"}


def algorithm_bytes(kind: str, bytes: int, n: int) -> int:
    """Return the size S that nccl-tests divides by the time for algbw.

    Source: NVIDIA nccl-tests, doc/PERFORMANCE.md, "Algorithm bandwidth"; of all_gather and gather
    the size is that of the output, as in src/all_gather.cu and src/gather.cu.
    """
    return bytes * n if kind in _TOTAL else bytes


def bus_factor(kind: str, n: int) -> float:
    """Return what algbw is multiplied with for busbw.

    With it the figure compares with the speed of the slowest link, whatever the number of ranks.

    Source: NVIDIA nccl-tests, doc/PERFORMANCE.md, "Bus bandwidth".
    """
    if kind == "all_reduce":
        return 2 * (n - 1) / n
    if kind in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"):
        return (n - 1) / n
    return 1.0


def sent_bytes(kind: str, bytes: int, n: int, backend: str) -> float:
    """Return what a rank sends to its peers, headers aside: the mean of the group's ranks.

    Both backends make one ring of the ranks for what all of them contribute to. gloo differs in
    this: its reduce_scatter is a whole all_reduce of which each keeps a part (torch's
    ProcessGroupGloo), and its reduce ends with a gather of the parts at the root. In a tree or
    along a ring, a broadcast reaches each other rank once.

    Sources: gloo's allreduce.cc, allgather.cc, reduce.cc, broadcast.cc, barrier.cc; NCCL's ring
    algorithms. NCCL may choose trees, which send as much in the mean of the ranks.

    Raises:
        UsageError: No such backend.
    """
    if backend not in ("gloo", "nccl"):
        raise UsageError(f"bytes on the wire are known for gloo and nccl, not for {backend}.")
    others = n - 1
    if n < 2 or kind in ("barrier", "monitored_barrier", "recv"):
        # A barrier of gloo sends messages without content, NCCL's reduces one byte.
        return 2 * others / n if backend == "nccl" and kind == "barrier" and n > 1 else 0.0
    if kind == "send":
        return float(bytes)
    if kind == "all_reduce" or (kind == "reduce_scatter" and backend == "gloo"):
        return 2 * others / n * bytes
    if kind in ("reduce_scatter", "all_to_all"):
        return others / n * bytes
    if kind == "all_gather":
        return float(others * bytes)
    if kind == "reduce" and backend == "gloo":
        # A ring leaves each rank a reduced part, and all but the root send theirs to it.
        return (others / n + others / n / n) * bytes
    if kind in ("broadcast", "reduce", "gather"):
        return others / n * bytes
    if kind == "scatter":  # `bytes` are the root's, one part a rank
        return others / n / n * bytes
    raise UsageError(f"there is no collective called {kind}.")
