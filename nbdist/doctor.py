"""Say what is wrong with this machine for nbdist, and the mend: `nbdist doctor`, `%dist doctor`.

Looking and judging are apart: `look_*` reads the machine, `judge_*` turns plain values into
findings. Nothing here imports torch; another interpreter does, and tells what it found.
"""

import contextlib
import importlib.metadata
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from packaging.requirements import Requirement

TORCH_TIMEOUT_S = 180.0  # the first import after an installation compiles and reads from disk
LOOPBACK_TIMEOUT_S = 2.0

_MIB = 1 << 20
_SMALL_SHM_BYTES = 256 * _MIB  # containers are given 64 MiB unless told otherwise
_MINIMUM_PYTHON = (3, 11)

# What processes of nbdist are started as: `python -m nbdist.host.parent ...`.
_OUR_MODULES = ("nbdist.host.", "nbdist.engine.")

_ASK_TORCH = """
import json, torch, torch.distributed as dist
cuda = torch.version.cuda
print(json.dumps({
    "version": torch.__version__,
    "cuda": cuda or "",
    "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    "gloo": dist.is_available() and dist.is_gloo_available(),
    "nccl": dist.is_available() and dist.is_nccl_available(),
}))
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `mend` is empty when nothing is to be done."""

    name: str
    says: str
    is_wrong: bool = False
    mend: str = ""


@dataclass(frozen=True, slots=True)
class Process:
    """What is needed to tell a process that was left over; `words` is its command line."""

    pid: int
    parent: int
    words: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Torch:
    """What torch says of itself; `cuda` is the version it was built for, empty for CPU builds."""

    version: str
    cuda: str
    gpus: tuple[str, ...]
    gloo: bool
    nccl: bool


def examine() -> list[Finding]:
    """Return all findings. Takes as long as one `import torch`, and never raises."""
    try:
        torch: Torch | str = look_at_torch(TORCH_TIMEOUT_S)
    except RuntimeError as error:
        torch = str(error)
    return [
        judge_python(sys.version_info[:3], sys.executable),
        *judge_packages(*look_at_packages()),
        *judge_torch(torch, has_gpu=Path("/dev/nvidia0").exists()),
        judge_cores(look_at_cores()),
        judge_shared_memory(look_at_shared_memory()),
        judge_loopback(look_at_loopback()),
        judge_leftovers(find_leftovers(look_at_processes())),
    ]


def render(findings: Sequence[Finding]) -> str:
    """Return the report as text: a line each, mends beneath, and a last line that sums it up."""
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        sign = "!!" if finding.is_wrong else "ok"
        lines.append(f"{sign}  {finding.name:<{width}}  {finding.says}")
        if finding.mend:
            lines.append(f"    {'':<{width}}  Do: {finding.mend}")
    wrong = sum(finding.is_wrong for finding in findings)
    if wrong:
        lines.append(f"{wrong} thing{'s' * (wrong > 1)} to mend.")
    else:
        lines.append("Nothing is wrong.")
    return "\n".join(lines)


# --- Python and packages -----------------------------------------------------------------------


def judge_python(version: Sequence[int], executable: str) -> Finding:
    """Judge the interpreter that runs this."""
    says = f"{'.'.join(map(str, version))}  {executable}"
    if tuple(version[:2]) < _MINIMUM_PYTHON:
        return Finding("python", says, True, "make a new environment with Python 3.11 or newer")
    return Finding("python", says)


def look_at_packages() -> tuple[str, list[str], dict[str, str]]:
    """Return nbdist's version, its requirements, and the versions installed of those.

    An nbdist that runs from a folder of sources has neither version nor requirements.
    """
    try:
        own = importlib.metadata.distribution("nbdist")
    except importlib.metadata.PackageNotFoundError:
        return "", [], {}
    requirements = [r for r in own.requires or [] if "extra ==" not in r]
    installed = {}
    for requirement in requirements:
        name = Requirement(requirement).name
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return own.version, requirements, installed


def judge_packages(
    version: str, requirements: Iterable[str], installed: Mapping[str, str]
) -> list[Finding]:
    """Judge nbdist and the packages it stands on, but torch."""
    if not version:
        return [Finding("nbdist", "runs from sources; what it needs could not be checked")]
    findings = [Finding("nbdist", version)]
    for requirement in map(Requirement, requirements):
        name, wanted = requirement.name, requirement.specifier
        has = installed.get(name)
        mend = f"{_pip()} install '{name}{wanted}'"
        if has is None:
            findings.append(Finding(name, f"not installed; needs {wanted}", True, mend))
        elif not wanted.contains(has, prereleases=True):
            findings.append(Finding(name, f"{has}; needs {wanted}", True, mend))
        elif name != "torch":  # which speaks for itself
            findings.append(Finding(name, has))
    return findings


def _pip() -> str:
    return f"{sys.executable} -m pip"


# --- torch and GPUs ----------------------------------------------------------------------------


def look_at_torch(timeout_s: float) -> Torch:
    """Import torch in an interpreter of its own and return what it says.

    Raises:
        RuntimeError: It could not be imported in time; the text is its last line.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK_TORCH],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"not imported within {timeout_s:.0f} s") from None
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"ended with status {done.returncode}"]
        raise RuntimeError(lines[-1])
    facts = json.loads(done.stdout.splitlines()[-1])
    return Torch(**{**facts, "gpus": tuple(facts["gpus"])})


def judge_torch(torch: Torch | str, *, has_gpu: bool) -> list[Finding]:
    """Judge torch (or the text of why it cannot be imported) and the GPUs it sees.

    Args:
        torch: What `look_at_torch` returned, or the text of its error.
        has_gpu: The machine shows an NVIDIA device, whatever torch says.
    """
    if isinstance(torch, str):
        return [Finding("torch", torch, True, f"{_pip()} install 'torch>=2.11'")]
    built = f"built for CUDA {torch.cuda}" if torch.cuda else "CPU build"
    if not torch.gloo:
        mend = "install a build of torch with distributed support, such as those of pytorch.org"
        findings = [Finding("torch", f"{torch.version}, {built}, without gloo", True, mend)]
    else:
        backends = "gloo, nccl" if torch.nccl else "gloo"
        findings = [Finding("torch", f"{torch.version}, {built}, {backends}")]
    if torch.gpus:
        findings.append(Finding("GPUs", f"{len(torch.gpus)}: {', '.join(torch.gpus)}"))
    elif has_gpu and torch.cuda:
        mend = "nvidia-smi shows whether the driver works and is new enough for this CUDA"
        findings.append(Finding("GPUs", "there are some, but torch sees none", True, mend))
    elif has_gpu:
        mend = "install a CUDA build of torch to use them; ranks run on the CPU until then"
        findings.append(
            Finding("GPUs", "there are some, but this torch cannot use them", True, mend)
        )
    else:
        findings.append(Finding("GPUs", "none; ranks run on the CPU"))
    return findings


# --- The machine -------------------------------------------------------------------------------


def look_at_cores() -> float:
    """Return how many cores this process may use; a container's quota may be a fraction."""
    allowed = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return allowed
    return allowed if quota == "max" else min(allowed, int(quota) / int(period))


def judge_cores(cores: float) -> Finding:
    """Judge the number of cores; fewer than ranks is slow, not wrong."""
    if cores < 2:
        return Finding("cores", f"{cores:g}: ranks take turns, so steps take as long as their sum")
    return Finding("cores", f"{cores:g}")


def look_at_shared_memory() -> int | None:
    """Return the size of /dev/shm in bytes; None where there is none (macOS)."""
    try:
        stat = os.statvfs("/dev/shm")
    except OSError:
        return None
    return stat.f_frsize * stat.f_blocks


def judge_shared_memory(size_bytes: int | None) -> Finding:
    """Judge /dev/shm, through which the workers of a DataLoader hand over their batches."""
    if size_bytes is None:
        return Finding("/dev/shm", "none on this system, and none needed")
    says = f"{size_bytes / _MIB:.0f} MiB"
    if size_bytes < _SMALL_SHM_BYTES:
        mend = "start the container with --shm-size=1g, or use DataLoader(num_workers=0)"
        return Finding("/dev/shm", f"{says}: workers of a DataLoader run out of it", True, mend)
    return Finding("/dev/shm", says)


def look_at_loopback() -> str:
    """Send a byte through 127.0.0.1; return what went wrong, empty when it arrived."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), LOOPBACK_TIMEOUT_S) as client,
        ):
            server.settimeout(LOOPBACK_TIMEOUT_S)
            peer, _ = server.accept()
            with peer:
                peer.settimeout(LOOPBACK_TIMEOUT_S)
                client.sendall(b"x")
                return "" if peer.recv(1) == b"x" else "nothing arrived"
    except OSError as error:
        return str(error)


def judge_loopback(error: str) -> Finding:
    """Judge the loopback interface, on which notebook and ranks of one machine talk."""
    if error:
        mend = "ip link set lo up    (as root; a firewall must let 127.0.0.1 talk to itself)"
        return Finding("loopback", f"127.0.0.1 does not answer: {error}", True, mend)
    return Finding("loopback", "127.0.0.1 answers")


# --- Processes that were left over -------------------------------------------------------------


def look_at_processes() -> list[Process]:
    """Return this user's processes."""
    me = os.getuid()
    found = []
    for process in psutil.process_iter():
        # Processes end while we look, and those of others keep their words to themselves.
        with contextlib.suppress(psutil.Error):
            if process.uids().real == me:
                words = tuple(process.cmdline())
                found.append(Process(process.pid, process.ppid(), words))
    return found


def find_leftovers(processes: Sequence[Process]) -> list[Process]:
    """Return processes of nbdist whose notebook has ended.

    A process of nbdist is the child of a notebook's kernel or of another process of nbdist. When
    the kernel ends, the eldest of them is handed to a process that has nothing to do with Python
    (init, a container's reaper, a user's systemd).
    """
    by_pid = {process.pid: process for process in processes}

    def is_left_over(process: Process) -> bool:
        seen = {process.pid}
        while (parent := by_pid.get(process.parent)) and parent.pid not in seen:
            if not _is_ours(parent):
                # A kernel, or a test that plays one; under `docker run` it may even be process 1.
                return not any("python" in word for word in parent.words[:2])
            seen.add(parent.pid)
            process = parent
        return True

    return [process for process in processes if _is_ours(process) and is_left_over(process)]


def _is_ours(process: Process) -> bool:
    return any(
        flag == "-m" and module.startswith(_OUR_MODULES)
        for flag, module in zip(process.words, process.words[1:], strict=False)
    )


def judge_leftovers(leftovers: Sequence[Process]) -> Finding:
    """Judge what `find_leftovers` found; such processes hold memory, cores and GPUs."""
    if not leftovers:
        return Finding("processes", "none left over")
    pids = " ".join(str(process.pid) for process in leftovers)
    says = f"{len(leftovers)} of notebooks that have ended still run"
    return Finding("processes", says, True, f"kill -9 {pids}")
