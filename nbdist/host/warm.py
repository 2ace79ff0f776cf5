"""What a parent imports before it forks, and whether it may fork at all.

Forking is safe only while the parent has one thread and has never touched CUDA. Where that cannot
be had (macOS, a site hook that starts threads), ranks are fresh interpreters.
"""

import gc
import importlib
import inspect
import json
import os
import select
import signal
import subprocess
import sys
import threading
from importlib.machinery import PathFinder
from pathlib import Path

from nbdist.shared import origins

# What a rank would otherwise import by itself, a second or more each.
MODULES = (
    "torch",
    "torch._dynamo",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "ipykernel.ipkernel",
    "ipykernel.debugger",
    "ipyparallel.engine.app",
    "nbdist.engine.compat.groups.torch_dist",
    "nbdist.engine.rank.boot",
    "nbdist.engine.rank.register",
    "nbdist.engine.rank.control",
    "nbdist.engine.rank.script",
    "nbdist.engine.rank.standalone",
    "nbdist.engine.recovery.resize",
    "nbdist.engine.training.torch_profile",
    "nbdist.shared.clock",
    "nbdist.host.store",
    # Which IPython and ipykernel import when a kernel is made.
    "IPython.core.completerlib",
    "IPython.core.logger",
    "IPython.core.oinspect",
    "IPython.extensions.storemagic",
    "cloudpickle",
    "sqlite3",
    "tornado.platform.asyncio",
    # The first traceback's: a rank that is interrupted cannot end its cell before it is made.
    "stack_data",
    "pygments.formatters.terminal256",
    "pygments.lexers.python",
)


def import_modules() -> None:
    """Import what ranks need, and leave it to be shared with them."""
    gc.disable()  # it looked through 300,000 objects again and again, a fifth of the time
    try:
        for name in MODULES:
            importlib.import_module(name)
    except Exception as error:
        for sentence in hidden_packages():
            error.add_note(sentence)
        raise
    # Fills the table of modules by file, which takes 0.1 s at the first traceback.
    inspect.getmodule(inspect.currentframe())
    # What is here now is never looked at again: a child's first full collection would
    # take 0.3 s, and copy every page that it shares with this process.
    gc.freeze()
    gc.enable()


def hidden_packages() -> list[str]:
    """Return a sentence for each file that is imported in the place of an installed package."""
    found = []
    for name in {full.partition(".")[0] for full in (*MODULES, *sys.modules)}:
        spec = PathFinder.find_spec(name, sys.path)
        if spec is None or not spec.origin or origins.is_library(spec.origin):
            continue
        folder = Path(spec.origin).parents[1 if spec.submodule_search_locations else 0]
        others = [place for place in sys.path if Path(place).absolute() != folder.absolute()]
        other = PathFinder.find_spec(name, others)
        if other is not None and other.origin and origins.is_library(other.origin):
            found.append(f"{spec.origin} is imported in place of the installed {name}: rename it.")
    return sorted(found)


def why_not_fork() -> str:
    """Return why this process must not fork, torch imported; or an empty text."""
    import torch

    if torch.cuda.is_initialized():
        return "CUDA is already initialised in the parent"
    return why_threads()


def why_threads() -> str:
    """Return that threads run here, which forbids to fork; or an empty text."""
    count = _count_threads()
    if count == 1:
        return ""
    return f"{count} threads run in the parent, and a process with threads must not fork"


def _count_threads() -> int:
    try:
        return len(os.listdir("/proc/self/task"))
    except FileNotFoundError:
        return threading.active_count()


def find_gpus(*, fork: bool) -> tuple[int, str]:
    """Count this machine's GPUs in another process, so that this one never touches CUDA.

    Returns:
        How many, and where there is none what torch says of that.
    """
    try:
        count, why = json.loads(_ask_in_fork() if fork else _ask_in_interpreter())
    except ValueError:
        return 0, "CUDA did not answer"
    return count, why


def ask_torch() -> str:
    """Return what `find_gpus` does, as JSON; CUDA may be initialised."""
    import torch

    count, why = torch.cuda.device_count() if torch.version.cuda else 0, ""
    if not count:
        try:
            torch.cuda.init()
        except Exception as error:
            why = str(error).partition("\n")[0]
    return json.dumps([count, why])


def _ask_in_fork() -> bytes:
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.write(write, ask_torch().encode())
        finally:
            os._exit(0)
    os.close(write)
    ready, _, _ = select.select([read], [], [], 30.0)
    text = os.read(read, 4096) if ready else b""
    os.close(read)
    if not ready:
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return text


def _ask_in_interpreter() -> bytes:
    code = "from nbdist.host import warm; print(warm.ask_torch())"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, timeout=60, check=True
        )
    except (subprocess.SubprocessError, OSError):
        return b""
    return (done.stdout.splitlines() or [b""])[-1]
