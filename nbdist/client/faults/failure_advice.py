"""What to do next, from what failed on the ranks. Pure."""

import re
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from nbdist.client.faults.advice import Advice, AdviceKind, WhatRan
from nbdist.client.faults.failures import Death, Failure, Group, place_of, uses_what_is_lost
from nbdist.shared import errors
from nbdist.shared.text import name_ranks

DO: Final = "Do:  "  # as `errors.NBDistError` prints it
_RETRY: Final = "%dist retry"
# Of DataLoader, and of torch's shared memory (MapAllocator.cpp).
_NO_SHARED_MEMORY: Final = re.compile(
    r"out of shared memory|unable to (allocate|open|resize|mmap|write to)\b.*?"
    r"(shared memory|</torch_|<filename not specified>).*?(No space left|Cannot allocate)"
    r"|unable to allocate shared memory|killed by signal: Bus error",
    re.DOTALL,
)
# Of torch/distributed/tensor/_dispatch.py, in a forward and in a step.
_UNGATHERED: Final = re.compile(
    r"got mixed torch\.Tensor and DTensor|in-place operations that require placement changes"
)


def of_gpu(
    groups: Sequence[Group], asked: Collection[int], ran: WhatRan, *, replaced: Collection[int]
) -> Advice | None:
    """Return what to do about errors of CUDA and NCCL; None where there is none.

    Args:
        groups: What failed.
        asked: All ranks that ran the cell.
        ran: What ran.
        replaced: Ranks that have new processes since.
    """
    spent = without_gpu(groups) - set(replaced)
    return _restart_advice(spent, asked, ran) if spent else _gpu_advice(groups, ran)


def without_gpu(groups: Iterable[Group]) -> set[int]:
    """Return the ranks that live and can make no CUDA call any more."""
    failed = [g for g in groups if isinstance(g.first, Failure) and g.first.gpu]
    return {rank for g in failed if g.first.gpu and g.first.gpu.ends_context for rank in g.ranks}


def _restart_advice(ranks: Collection[int], asked: Collection[int], ran: WhatRan) -> Advice:
    """Return what to do when these ranks need new processes."""
    _, _, chosen = name_ranks(ranks).partition(" ")
    after = "" if set(asked) > set(ranks) else ", after those that make what it uses"
    return Advice(
        AdviceKind.RESTART,
        f"%dist restart -r {chosen.replace(' ', '')}    (every CUDA call of the old process "
        f"fails), then fix {ran.name} and run it again{after}.",
    )


def _gpu_advice(groups: Iterable[Group], ran: WhatRan) -> Advice | None:
    """Return what to do about an error of CUDA or NCCL, of ranks whose processes are whole."""
    known = next((group.first.gpu for group in groups if group.first.gpu), None)
    if known is None:
        return None
    kind = AdviceKind.RETRY if known.can_retry else AdviceKind.FIX
    return Advice(kind, known.do or f"fix {ran.name} and run it again.")


def of_failures(groups: Sequence[Group], ran: WhatRan) -> Advice:
    """Return what to do next, from what failed."""
    causes = [group.first for group in groups]
    if any(isinstance(c, Failure) and uses_what_is_lost(c.ename) for c in causes):
        is_state = any(_is_state(c) for c in causes)
        return ran.make_again("" if is_state else _RETRY)
    if len(groups) == 1 and isinstance(causes[0], Failure) and (own := _own_advice(causes[0])):
        return own
    if ran.words and all(_refuses_words(cause) for cause in causes):
        return ran.look_at_words
    place = place_of(causes[0]) if len(causes) == 1 and isinstance(causes[0], Failure) else ""
    return _shared_memory_advice(causes) or _shards_advice(causes) or ran.fix(place)


def _is_state(cause: "Failure | Death") -> bool:
    """Return whether a cell uses a model whose state is lost: its training starts over."""
    return isinstance(cause, Failure) and cause.ename.rpartition(".")[2] == "LostStateError"


def _own_advice(failure: Failure) -> Advice | None:
    """Return what an error of nbdist's says itself; a rank's reply has only its text."""
    if not hasattr(errors, failure.ename):
        return None
    own = [line for line in failure.evalue.split("\n") if line.startswith(DO)]
    if not own:
        return None
    text = own[-1].removeprefix(DO)
    return Advice(AdviceKind.RETRY if _RETRY in text else AdviceKind.FIX, text)


def _refuses_words(cause: Failure | Death) -> bool:
    """Return whether a script has ended as argparse ends one."""
    return isinstance(cause, Failure) and (cause.ename, cause.evalue) == ("SystemExit", "2")


def _shared_memory_advice(causes: Iterable[Failure | Death]) -> Advice | None:
    """Return what to do when /dev/shm is full: torch says so in many ways, or by a bus error."""
    if not any(_lacks_shared_memory(cause) for cause in causes):
        return None
    return Advice(
        AdviceKind.FIX,
        "/dev/shm is full; DataLoader workers pass their batches through it. Use "
        "num_workers=0 or smaller batches, delete files left in it (%dist doctor lists them), or "
        "start the container with --shm-size=1g.",
    )


def _shards_advice(causes: Iterable[Failure | Death]) -> Advice | None:
    """Return what to do where a model computes with shards that nothing has gathered."""
    if not any(isinstance(cause, Failure) and _UNGATHERED.search(cause.evalue) for cause in causes):
        return None
    return Advice(
        AdviceKind.FIX,
        "weights are shards here, and whole only while model(...) runs. A method or a part of it "
        "that is called by itself finds shards: have forward call it.",
    )


def _lacks_shared_memory(cause: Failure | Death) -> bool:
    if isinstance(cause, Death):
        return False
    # Python's own error does not name the place where there is no space.
    unnamed = cause.evalue == "[Errno 28] No space left on device"
    if unnamed and any(n in f for f in cause.traceback for n in ("SemLock", "shared_memory.py")):
        return True
    return _NO_SHARED_MEMORY.search(cause.evalue) is not None
