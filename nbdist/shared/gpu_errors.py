"""What errors of CUDA and NCCL mean, and what to do: one table, by what torch's texts say. Pure.

The texts are those of torch 2.11 to 2.13 (c10/cuda, ProcessGroupNCCL.cpp), of the CUDA runtime and
of NCCL; a few are older ones that say the same.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

_LATE: Final = "CUDA reports it late: an earlier line may have caused it."
_ON_CPU: Final = "or %dist start --device cpu."


@dataclass(frozen=True, slots=True)
class GpuError:
    """What an error means.

    Attributes:
        said: The words by which it is known, as torch wrote them.
        why: What they mean, in a sentence or two.
        do: What to do; empty where a new process of the rank is what it takes.
        can_retry: Nothing is wrong with the cell itself: it can be run again as it is.
    """

    said: str
    why: str
    do: str = ""
    can_retry: bool = False

    @property
    def ends_context(self) -> bool:
        """Whether every later CUDA call of the process fails, whatever it is."""
        return not self.do


@dataclass(frozen=True, slots=True)
class _Row:
    """A pattern of torch's text, and the `why` and `do` of what it is."""

    pattern: str
    why: str
    do: str = ""
    can_retry: bool = False


# Of a kernel's assertion, by its text. In both tables the first row that fits counts.
_ASSERTIONS: Final = (
    _Row(
        r"\bt >= 0 && t < n_classes|cur_target >= 0 && cur_target < n_classes",
        "A class label for nll_loss or cross_entropy is outside of the number of classes",
    ),
    _Row(
        r"\b(src|dst)\w*Index < |vectorized gather",
        "An index is out of range in an embedding, index_select or gather",
    ),
    _Row(
        r"idx_dim < index_size|index out of bounds",
        "An index is out of range in a gather, a scatter or x[index]",
    ),
    _Row(
        r"input_val >= zero && input_val <= one",
        "An input of binary_cross_entropy is not between 0 and 1",
    ),
    _Row(
        r"cumdist|isnan\(|isinf\(|val >= zero|sum > accZero|input\[0\] != ",
        "A number is negative, nan or inf where it may not be, as a probability for "
        "torch.multinomial",
    ),
)
_OF_A_KERNEL: Final = r"block: \[[-\d,]+\], thread: \[[-\d,]+\] "
_ASSERTION: Final = re.compile(
    rf"(?P<file>[^\s:/\\]+:\d+): (?:.*: )?{_OF_A_KERNEL}(?P<said>Assertion `.*` failed)\."
)

_TABLE: Final = (
    _Row(
        r"device-side assert triggered",
        "A check in a kernel on the GPU failed: most often an index is out of range, or a "
        f"class label outside of the number of classes. {_LATE}",
    ),
    _Row(
        r"an illegal memory access was encountered|misaligned address|"
        r"an illegal instruction was encountered|unspecified launch failure",
        f"A kernel on the GPU used memory that is not its own. {_LATE}",
    ),
    _Row(
        r"CUDA error: out of memory",
        "The GPU has no memory left for one more process: others hold it.",
        "end the process that holds it: nvidia-smi shows which.",
    ),
    _Row(
        r"no kernel image is available",
        "This build of torch has no code for this kind of GPU.",
        f"install a build of torch for this GPU and restart the kernel, {_ON_CPU}",
    ),
    _Row(
        r"CUDA driver version is insufficient|NVIDIA driver on your system is too old",
        "The NVIDIA driver is too old for the CUDA that torch is built for.",
        "update the driver, or install a build of torch for an older CUDA (nvidia-smi shows "
        f"the newest that the driver knows), {_ON_CPU}",
    ),
    _Row(
        r"Found no NVIDIA driver",
        "There is no NVIDIA driver on this machine, or none in this container.",
        f"install the driver, start the container with --gpus all, {_ON_CPU}",
    ),
    _Row(
        r"Torch not compiled with CUDA enabled",
        "This build of torch is for the CPU alone.",
        f"install a build of torch for CUDA and restart the kernel, {_ON_CPU}",
    ),
    _Row(
        r"No CUDA GPUs are available|no CUDA-capable device is detected",
        "The driver shows no GPU to this process.",
        "look at CUDA_VISIBLE_DEVICES and nvidia-smi; a change of the environment needs a new "
        f"kernel; {_ON_CPU}",
    ),
    _Row(
        r"invalid device ordinal",
        "There is no GPU of that number: the process sees fewer.",
        "use fewer ranks (%dist start -n), or look at CUDA_VISIBLE_DEVICES; in a cell, use "
        "`device`, which is this rank's.",
    ),
    _Row(
        r"CUDA-capable device\S* (is/)?are busy or unavailable",
        "The GPU takes no more processes: most often it is in exclusive mode, and another "
        "process has it.",
        "end the other process (nvidia-smi shows it), or let processes share the GPU: "
        "nvidia-smi -c DEFAULT, as root.",
    ),
    _Row(
        r"Duplicate GPU detected",
        "Two ranks have the same GPU, which NCCL refuses.",
        "%dist start with as many ranks as there are GPUs, or with --backend gloo, over which "
        "ranks share one.",
    ),
    _Row(
        r"unhandled (system|cuda) error",
        "NCCL could not get something of the system or the GPU: a socket, shared memory, "
        "memory of the GPU.",
        "%env NCCL_DEBUG=INFO in a new kernel, before its first %dist start: NCCL then prints "
        "what it could not get.",
    ),
    _Row(
        r"Watchdog caught collective operation timeout",
        "A collective did not end within its time: a rank did not call it, or came too late.",
        "make the same calls on all ranks of the group; where a rank may take longer, "
        "%dist start --timeout SECONDS.",
    ),
    _Row(
        r"NCCL communicator was aborted",
        "The communicator was aborted after another error, on this rank or on a peer.",
        "%dist retry runs the cell again.",
        can_retry=True,
    ),
)

_ADVICE: Final = re.compile(
    r"Search for `\w+' in https|CUDA kernel errors might be asynchronously reported"
    r"|For debugging consider passing CUDA_LAUNCH_BLOCKING|Compile with `TORCH_USE_CUDA_DSA`"
    r"|For more detailed error information, run with CUDA_LOG_FILE"
    r"|Device-side assertion tracking was not enabled"
)
_FRAME: Final = re.compile(r"frame #\d+: |Exception raised from .* \(most recent call first\):$")


def explain(text: str, asserted: str = "") -> GpuError | None:
    """Return what an error of CUDA or NCCL means; None for any other.

    Args:
        text: An exception's, or what C++ wrote before it called abort().
        asserted: Lines that the process wrote meanwhile, with the assertions of its kernels.
    """
    if known := _explain_assertion(text):
        return known
    for row in _TABLE:
        if found := re.search(row.pattern, text):
            known = GpuError(found.group(), row.why, row.do, row.can_retry)
            return (_explain_assertion(asserted) or known) if known.ends_context else known
    return None


def _explain_assertion(text: str) -> GpuError | None:
    """Return what the first assertion of a kernel means: it has ended all later ones."""
    found = _ASSERTION.search(text)
    if found is None:
        return None
    meanings = (row.why for row in _ASSERTIONS if re.search(row.pattern, found["said"]))
    meaning = next(meanings, "A check in a kernel on the GPU failed")
    return GpuError(found["said"], f"{meaning} ({found['file']}). {_LATE}")


def assertions(lines: Iterable[str]) -> tuple[str, ...]:
    """Return those lines that tell a kernel's assertion."""
    return tuple(line for line in lines if _ASSERTION.search(line))


def without_frames(lines: Iterable[str]) -> Iterator[str]:
    """Leave out a C++ exception's stack, and torch's general advice on errors of CUDA."""
    return (line for line in lines if not (_FRAME.match(line) or _ADVICE.match(line)))


def without_repeated_advice(lines: Iterable[str], *, explained: bool) -> Iterator[str]:
    """Leave out torch's general advice on errors of CUDA where it has been given already.

    Args:
        lines: Of a traceback.
        explained: The error is in our table, which says more.
    """
    seen: set[str] = set()
    for line in lines:
        if not _ADVICE.match(line):
            yield line
        elif not explained and line not in seen:
            seen.add(line)
            yield line
