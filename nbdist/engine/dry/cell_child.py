"""The process of one dry cell: `python -m nbdist.engine.dry.cell_child`, the request on its stdin.

It answers with a pickled `DryRun` on stdout; what cells print goes nowhere.
"""

import os
import pickle
import sys

from nbdist.shared.processes.lifeline import end_with


def main() -> None:
    """Answer one request, and leave nothing behind."""
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    end_with(os.getppid())
    request = pickle.load(sys.stdin.buffer)
    sys.path[:] = request["path"]
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    from nbdist.engine.dry.cell import AskedCell
    from nbdist.engine.dry.world import check

    torch.set_num_threads(1)
    answer.write(pickle.dumps(check(AskedCell(**request["cell"]), request["ranks"])))
    answer.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
