"""Check this machine for nbdist, and suggest fixes: `nbdist doctor`, `%dist doctor`.

Looking and judging are apart: `look_*` reads the machine, `judge_*` turns plain values into
findings. Nothing here imports torch; another interpreter does, and tells what it found.
"""

import sys
from pathlib import Path

from nbdist.doctor import machine, network, orphans, software
from nbdist.doctor.findings import Finding as Finding
from nbdist.doctor.findings import render as render
from nbdist.shared import background


def examine() -> list[Finding]:
    """Return all findings. Takes as long as one `import torch`, and never raises."""
    try:
        torch: software.Torch | str = software.look_at_torch(software.TORCH_TIMEOUT_S)
    except RuntimeError as error:
        torch = str(error)
    broken = software.look_at_client() + list(() if isinstance(torch, str) else torch.broken)
    try:
        folder = Path.cwd()
    except OSError:
        folder = Path()  # it has been deleted, and its disk can still be asked
    return [
        software.judge_python(sys.version_info[:3], sys.executable),
        *software.judge_packages(*software.look_at_packages()),
        *software.judge_torch(torch, has_gpu=Path("/dev/nvidia0").exists()),
        software.judge_private_parts(broken),
        machine.judge_cores(background.cores()),
        machine.judge_memory(*machine.look_at_memory()),
        machine.judge_shared_memory(machine.look_at_shared_memory()),
        machine.judge_disk(folder, machine.look_at_disk(folder)),
        machine.judge_descriptors(machine.look_at_descriptors()),
        *network.examine(),
        *orphans.examine(),
    ]
