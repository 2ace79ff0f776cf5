"""The facts of each collective, for both sides: who waits for whom, and what is moved.

A collective that is new has its line in `COLLECTIVES` and its operator in `engine/tap/ops.py`.

`bytes` is what one rank puts in, throughout (of a broadcast or a scatter, what its root does), and
`n` the ranks of the group.
"""

from dataclasses import dataclass
from typing import Final, Literal

from nbdist.shared.errors import UsageError


@dataclass(frozen=True, slots=True)
class Collective:
    """One kind of collective.

    `root` says how data moves between the root and the others; it is "" where there is none.
    `reduces` tells whether a reduction belongs to the call. `share` is what busbw is of algbw, in
    parts of (n - 1) / n; 0 where the two are equal. `is_gathered`: nccl-tests counts the bytes of
    all ranks together.
    """

    kind: str
    root: Literal["from", "to", ""] = ""
    reduces: bool = False
    share: int = 0
    is_gathered: bool = False

    @property
    def waits_for_all(self) -> bool:
        """Whether it ends on no rank before all have launched it."""
        return not self.root


# Ranks name a kind by its position: new ones come last.
COLLECTIVES = {
    one.kind: one
    for one in (
        Collective("all_reduce", reduces=True, share=2),
        Collective("broadcast", root="from"),
        Collective("reduce", root="to", reduces=True),
        Collective("all_gather", share=1, is_gathered=True),
        Collective("reduce_scatter", reduces=True, share=1),
        Collective("gather", root="to", share=1, is_gathered=True),
        Collective("scatter", root="from", share=1),
        Collective("all_to_all", share=1),
        Collective("barrier"),
        Collective("monitored_barrier"),
    )
}


def waits_for_all(kind: str) -> bool:
    """Return whether such a call ends on no rank before all launched it; false of messages."""
    return kind in COLLECTIVES and COLLECTIVES[kind].waits_for_all


def algorithm_bytes(kind: str, bytes: int, n: int) -> int:
    """Return the size S that nccl-tests divides by the time for algbw.

    Source: NVIDIA nccl-tests, doc/PERFORMANCE.md, "Algorithm bandwidth"; of all_gather and gather
    the size is that of the output, as in src/all_gather.cu and src/gather.cu.
    """
    return bytes * n if kind in COLLECTIVES and COLLECTIVES[kind].is_gathered else bytes


def bus_factor(kind: str, n: int) -> float:
    """Return what algbw is multiplied with for busbw.

    With it the figure compares with the speed of the slowest link, whatever the number of ranks.

    Source: NVIDIA nccl-tests, doc/PERFORMANCE.md, "Bus bandwidth".
    """
    share = COLLECTIVES[kind].share if kind in COLLECTIVES else 0
    return share * (n - 1) / n if share else 1.0


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


_RINGS: Final = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}


def rounds(kind: str, n: int, backend: str) -> int:
    """Return how many messages one collective sends one after another: each waits a latency.

    Along a ring a part passes each other rank; a tree has as many levels as `n` has doublings. NCCL
    reduces what is short, whose latency counts, in trees.

    Sources: gloo's allreduce.cc, allgather.cc, broadcast.cc, barrier.cc (dissemination); NCCL,
    "Massively Scale Your Deep Learning Training with NCCL 2.4" (trees).
    """
    if n < 2 or kind == "recv":
        return 0
    levels = (n - 1).bit_length()
    if kind == "all_reduce" and backend == "nccl":
        return 2 * levels
    if kind in _RINGS:
        is_all_reduce = kind == "reduce_scatter" and backend == "gloo"
        return (2 if is_all_reduce else _RINGS[kind]) * (n - 1)
    if kind in ("broadcast", "reduce", "barrier", "monitored_barrier"):
        return levels
    return 1  # sent at once to all: gather, scatter, all_to_all, send
