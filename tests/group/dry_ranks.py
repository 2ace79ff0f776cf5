"""Checks cells one after the other in one process: `python -m tests.group.dry_ranks NAME ...`."""

import json
import sys

import torch

from nbdist.engine.dry.cell import AskedCell
from nbdist.engine.dry.world import check
from tests.group.dry_cells import PLANTED, SOUND


def main() -> None:
    """Print a line of JSON: for each name whether all is sound, the findings, and the text."""
    torch.set_num_threads(1)
    found = {}
    for case in (*SOUND, *PLANTED):
        if case.name in sys.argv[1:]:
            asked = AskedCell(case.code, (), case.n, min(8, case.n), case.memory)
            ran = check(asked, range(case.n))
            findings = [(one.kind, one.places, one.text) for one in ran.findings]
            found[case.name] = (ran.is_sound, findings, str(ran))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
