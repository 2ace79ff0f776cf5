"""Checks cells one after the other in one process: `python -m tests.group.dry_ranks NAME ...`.

With `--each` all ranks are run, also those of one kind.
"""

import json
import os
import sys

import torch

from nbdist.engine.dry import world
from nbdist.engine.dry.cell import AskedCell
from tests.group.dry_cells import OF_KINDS, PLANTED, SOUND

forks: list[int] = []
really_fork = os.fork


def fork() -> int:
    forks.append(really_fork())
    return forks[-1]


def main() -> None:
    """Print a line of JSON: of each name whether all is sound, findings, text, and forks."""
    torch.set_num_threads(1)
    os.fork = fork
    if "--each" in sys.argv:
        vars(world)["kinds_of"] = lambda _codes, ranks, *_: [[rank] for rank in ranks]
    found = {}
    for case in (*SOUND, *PLANTED, *OF_KINDS):
        if case.name in sys.argv[1:]:
            asked = AskedCell(case.code, (), case.n, min(8, case.n), case.memory)
            forks.clear()
            ran = world.check(asked, range(case.n))
            findings = [(one.kind, one.places, one.text) for one in ran.findings]
            found[case.name] = (ran.is_sound, findings, str(ran), len(forks))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
