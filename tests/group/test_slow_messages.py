"""A message may be waited for as long as its group's collectives, and not as its connections."""

import time

from tests.group.engines import cluster

FORM_TIMEOUT_S = 1.0


def send_late() -> float:
    import torch
    import torch.distributed as dist

    from nbdist.engine.group import group
    from nbdist.engine.tap import tap

    tap.install()
    group.reform(1, FORM_TIMEOUT_S)
    got = torch.zeros(1)
    if dist.get_rank():
        dist.recv(got, 0)
    else:
        time.sleep(2 * FORM_TIMEOUT_S)
        dist.send(torch.ones(1), 1)
    return got.item()


def test_a_message_that_comes_later_than_its_connection_had_to_is_received() -> None:
    with cluster(2) as ranks:
        assert ranks.run(send_late) == [0.0, 1.0]
