"""A rank in a time namespace of its own, as one on another host: its clock shows something else.

Run as `python -m tests.group.namespace_rank RANK STORE`; speaks lines of JSON. "clock" is answered
with `nbdist.shared.clock.read`; "train" with the records of some steps, pickled, and when it came.
"""

import base64
import json
import pickle
import sys
from datetime import timedelta

import torch.distributed as dist

from nbdist.shared import clock
from tests.measured.test_insight import _train

LATE = 1


def main() -> None:
    rank, store = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    for line in sys.stdin:
        if line.strip() == "clock":
            answer = json.dumps(clock.read())
        else:
            told = _train("a collective", LATE)
            answer = base64.b64encode(pickle.dumps(told)).decode()
        print(answer, flush=True)


if __name__ == "__main__":
    main()
