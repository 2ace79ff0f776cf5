"""Refuse a kernel that has imported what is too old, before anything fails by it.

pip replaces packages on disk, and a kernel keeps what it has imported until it is restarted. Ranks
are new processes: they have what is on disk. Main thread.
"""

import importlib.metadata
import sys
from collections.abc import Iterable, Mapping

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from nbdist.shared.errors import UsageError

# Ranks need ipykernel 7. Of the kernel's own only `output.pages` needs it, and does without.
_OF_KERNELS = {"ipykernel": SpecifierSet(">=6.17")}
_IMPORTED_AS = {"ipython": "IPython", "pyyaml": "yaml"}


def require_new_enough() -> None:
    """Refuse this process where it has imported a package that is too old for nbdist.

    Raises:
        UsageError: Names the package, what is wanted, and that the kernel is to be restarted.
    """
    try:
        words = importlib.metadata.requires("nbdist") or []
    except importlib.metadata.PackageNotFoundError:
        return  # it runs from sources, and nothing tells what it needs
    wanted = [it for it in map(Requirement, words) if it.marker is None]
    found = {it.name: getattr(_module(it.name), "__version__", None) for it in wanted}
    refuse_too_old(wanted, {name: version for name, version in found.items() if version})


def refuse_too_old(wanted: Iterable[Requirement], imported: Mapping[str, str]) -> None:
    """Refuse the first requirement that the version imported does not meet.

    Args:
        wanted: nbdist's requirements.
        imported: The versions of those that are imported, by the requirement's name.

    Raises:
        UsageError: There is one.
    """
    for requirement in wanted:
        version = imported.get(requirement.name)
        bounds = _OF_KERNELS.get(requirement.name, requirement.specifier)
        if version is not None and not bounds.contains(version, prereleases=True):
            raise UsageError(
                f"This kernel has imported {requirement.name} {version}, and nbdist needs "
                f"{requirement.name}{bounds}.",
                why="pip replaces packages on disk; a kernel keeps those that it has imported",
                do="restart the kernel, then run its cells again. If this comes again: "
                f"%pip install '{requirement.name}{requirement.specifier}', and restart once more",
            )


def _module(name: str) -> object:
    return sys.modules.get(_IMPORTED_AS.get(name, name))
