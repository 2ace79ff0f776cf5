"""Python, packages, torch, and whether the private parts of others that we use are there."""

import contextlib
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from packaging.requirements import Requirement

from nbdist.doctor.findings import Finding

TORCH_TIMEOUT_S = 180.0  # the first import after an installation compiles and reads from disk
_MINIMUM_PYTHON = (3, 11)

# Each has a `check()` that names what is gone of the private parts it uses.
MODULES = (
    *("kernel.ipython.kernel", "kernel.ipython.shell"),
    *("kernel.ipython.tracebacks", "kernel.ipython.cell_compiler"),
    *("recovery.clone.torch_rebuild", "recovery.clone.torch_rebuild_fsdp"),
    *("recovery.clone.torch_rebuild_zero", "recovery.clone.pickler"),
    *(
        "compat.groups.torch_groups",
        "compat.groups.torch_backends",
        "compat.torch_init",
        "compat.torch_graph",
        "compat.torch_hooks",
        "compat.torch_modules",
    ),
    *(
        "compat.torch_reducers",
        "compat.torch_sharded",
        "compat.torch_shards",
        "compat.torch_zero",
        "compat.torch_pipeline",
        "compat.torch_wrappers",
    ),
    *(
        "compat.torch_transformer",
        "compat.torch_fakes",
        "compat.torch_dry",
        "compat.torch_quantized",
        "compat.torch_loaders",
        "compat.cuda_graphs",
    ),
    *("compat.checkpoints.torch_checkpoint", "compat.libraries.third_parties"),
    "compat.libraries.hf_datasets",
    "compat.libraries.torchao_products",
)

# What is broken in them comes last: what they import may raise.
_ASK_TORCH = f"""
from importlib import import_module
import json, torch, torch.distributed as dist
cuda = torch.version.cuda
facts = {{
    "version": torch.__version__,
    "cuda": cuda or "",
    "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    "gloo": dist.is_available() and dist.is_gloo_available(),
    "nccl": dist.is_available() and dist.is_nccl_available(),
}}
try:
    modules = [import_module("nbdist.engine." + name) for name in {MODULES}]
    facts["broken"] = [line for module in modules for line in module.check()]
except Exception as error:
    facts["broken"] = [type(error).__name__ + ": " + str(error)]
print(json.dumps(facts))
"""


@dataclass(frozen=True, slots=True)
class Torch:
    """What torch says of itself; `cuda` is the version it was built for, empty for CPU builds.

    `broken` are private parts of torch, IPython, ipykernel and ipyparallel's engine that nbdist
    uses and that are not there.
    """

    version: str
    cuda: str
    gpus: tuple[str, ...]
    gloo: bool
    nccl: bool
    broken: tuple[str, ...] = ()


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
        fix = f"{_pip()} install '{name}{wanted}'"
        if has is None:
            findings.append(Finding(name, f"not installed; needs {wanted}", True, fix))
        elif not wanted.contains(has, prereleases=True):
            findings.append(Finding(name, f"{has}; needs {wanted}", True, fix))
        elif name != "torch":  # which speaks for itself
            findings.append(Finding(name, has))
    return findings


def _pip() -> str:
    return f"{sys.executable} -m pip"


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
            # Where the notebook finds nbdist, this interpreter does.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"not imported within {timeout_s:.0f} s") from None
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"ended with status {done.returncode}"]
        raise RuntimeError(lines[-1])
    facts = json.loads(done.stdout.splitlines()[-1])
    facts |= {"gpus": tuple(facts["gpus"]), "broken": tuple(facts["broken"])}
    return Torch(**facts)


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
        fix = "install a build of torch with distributed support, such as those of pytorch.org"
        findings = [Finding("torch", f"{torch.version}, {built}, without gloo", True, fix)]
    else:
        backends = "gloo, nccl" if torch.nccl else "gloo"
        findings = [Finding("torch", f"{torch.version}, {built}, {backends}")]
    if torch.gpus:
        findings.append(Finding("GPUs", f"{len(torch.gpus)}: {', '.join(torch.gpus)}"))
    elif has_gpu and torch.cuda:
        fix = "nvidia-smi shows whether the driver works and is new enough for this CUDA"
        findings.append(Finding("GPUs", "there are some, but torch sees none", True, fix))
    elif has_gpu:
        fix = "install a CUDA build of torch to use them; ranks run on the CPU until then"
        findings.append(
            Finding("GPUs", "there are some, but this torch cannot use them", True, fix)
        )
    else:
        findings.append(Finding("GPUs", "none; ranks run on the CPU"))
    return findings


def look_at_client() -> list[str]:
    """Return the private parts of ipyparallel's client and of ipykernel that are not there."""
    try:
        from nbdist.client.cluster import connection
        from nbdist.client.output import pages

        return [*connection.check(), *pages.check()]
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]


def judge_private_parts(broken: Sequence[str]) -> Finding:
    """Judge whether nbdist fits the versions of what it looks into."""
    if not broken:
        return Finding("versions", "torch, IPython, ipykernel and ipyparallel fit this nbdist")
    fix = "install the versions of nbdist's constraints.txt, or a newer nbdist"
    return Finding("versions", f"do not fit this nbdist: {'; '.join(broken)}", True, fix)
