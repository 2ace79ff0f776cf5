"""On the ranks of test_peer_moves: snapshots whose peers change."""

import time
from typing import Any

import torch
import torch.distributed as dist

from nbdist.engine.group import state
from nbdist.engine.recovery.snapshots import peer_state, peers
from nbdist.engine.recovery.snapshots.saved import Saved, metas_of
from nbdist.shared.options import LOOPBACK

BOX, VALUES = "a model", "values"

Peers = dict[int, int | None]


def begin(peer_of: Peers) -> None:
    """Keep a snapshot at each step with these peers."""
    rank = dist.get_rank()
    client = state.here.member().client
    peers.here.start(rank, peer_of[rank], every=1, host=LOOPBACK, key=b"a key", client=client)
    dist.barrier()


def move(peer_of: Peers) -> None:
    """Have other peers from now on."""
    peers.here.reconnect()
    peers.here.move(peer_of)


def send(step: int) -> None:
    """Send the snapshot of a step, and a value, to the peer."""
    tensor = torch.full((3,), float(step))
    peers.here.offer(
        BOX, Saved((step,), time.time(), None, metas_of([tensor]), None, None), [tensor]
    )
    peers.here.offer_values(VALUES, step)
    peers.here.wait()
    dist.barrier()


def held() -> dict[int, Any]:
    """Return the newest step and value that are kept here, by rank."""
    snapshots = {rank: boxes[BOX][0][0][0] for rank, boxes in peers.here.held().items()}
    return {rank: (step, peers.here.get_values(rank, VALUES)) for rank, step in snapshots.items()}


def newest(rank: int) -> tuple[int, int]:
    """Return from whom a rank would get its state, and of which step. All ranks."""
    kept = peer_state.kept([rank])[rank]
    return kept.holder, kept.snapshots[BOX][0][0][0]


def end() -> None:
    """Keep nothing."""
    peers.here.stop()
