"""The messages of workers and a server: heads of integers, bodies of bytes.

Point-to-point over gloo, whose receives must know the size. Tensors on a GPU go through the host's
memory. The caller waits; see `serving` for the threads.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from nbdist.engine.averaging.master import Answer, Gradients, Status
from nbdist.engine.averaging.staleness import Staleness
from nbdist.engine.compat.checkpoints import tensor_bytes

UPDATE, ASK, FINISH, LEAVE = range(1, 5)  # requests of a worker
_UNKNOWN = 9  # the server has no such master
_STATUS: tuple[Status, ...] = ("wait", "done", "all done")

_HEAD, _BODY, _ANSWER_HEAD, _ANSWER_BODY = range(101, 105)  # tags
_HEAD_SIZE, _ANSWER_SIZE = 5, 7
_NONE = -1


def send_request(
    group: dist.ProcessGroup,
    server: int,
    kind: int,
    number: int,
    cell: int,
    gradients: Gradients | None = None,
    like: Sequence[torch.Tensor] = (),
) -> None:
    """Send a worker's request to the master with this number; `like` are the parameters."""
    body = None if gradients is None else _pack_gradients(gradients, like)
    read = 0 if gradients is None else gradients.read
    size = 0 if body is None else body.numel()
    dist.send(torch.tensor([kind, number, cell, read, size]), server, group, _HEAD)
    if body is not None:
        dist.send(body, server, group, _BODY)


@dataclass(frozen=True, slots=True)
class Request:
    """A worker's request: `kind`, to the master `number`, in a cell; `body` has gradients."""

    worker: int
    kind: int
    number: int
    cell: int
    read: int
    body: torch.Tensor | None


def receive_request(group: dist.ProcessGroup, worker: int) -> Request:
    """Wait for a worker."""
    head = torch.zeros(_HEAD_SIZE, dtype=torch.int64)
    dist.recv(head, worker, group, _HEAD)
    kind, number, cell, read, size = head.tolist()
    body = None
    if size:
        body = torch.empty(size, dtype=torch.uint8)
        dist.recv(body, worker, group, _BODY)
    return Request(worker, kind, number, cell, read, body)


def send_answer(group: dist.ProcessGroup, worker: int, answer: Answer | None) -> None:
    """Answer a worker; None: there is no such master."""
    if answer is None:
        dist.send(torch.tensor([_UNKNOWN] + [0] * (_ANSWER_SIZE - 1)), worker, group, _ANSWER_HEAD)
        return
    seen = answer.staleness
    newest = _NONE if seen.newest is None else seen.newest
    counts = [seen.updates, seen.total, seen.max, newest, seen.dropped]
    head = [_STATUS.index(answer.status), answer.version, *counts]
    dist.send(torch.tensor(head), worker, group, _ANSWER_HEAD)
    if answer.parameters:
        dist.send(_pack(answer.parameters), worker, group, _ANSWER_BODY)


def receive_answer(
    group: dist.ProcessGroup, server: int, like: Sequence[torch.Tensor]
) -> Answer | None:
    """Wait for the answer; its parameters have the shapes of `like`. None: no such master."""
    head = torch.zeros(_ANSWER_SIZE, dtype=torch.int64)
    dist.recv(head, server, group, _ANSWER_HEAD)
    status, version, updates, total, most, newest, dropped = head.tolist()
    if status == _UNKNOWN:
        return None
    seen = Staleness(updates, total, most, None if newest == _NONE else newest, dropped)
    if _STATUS[status] == "wait":
        return Answer("wait", version, seen)
    body = torch.empty(sum(t.nbytes for t in like), dtype=torch.uint8)
    dist.recv(body, server, group, _ANSWER_BODY)
    return Answer(_STATUS[status], version, seen, tuple(_unpack(body, like)))


def unpack_gradients(
    body: torch.Tensor, read: int, like: tuple[int, Sequence[torch.Tensor]]
) -> Gradients:
    """Return the gradients that `send_request` was called with.

    Args:
        body: As received.
        read: As received.
        like: How many learning rates there are, and the parameters.
    """
    groups, parameters = like
    rates = torch.empty(groups, dtype=torch.float64)
    mask = torch.empty(len(parameters), dtype=torch.uint8)
    first, *values, last = _unpack(body, [rates, *parameters, mask])
    given = [v if is_given else None for v, is_given in zip(values, last.tolist(), strict=True)]
    return Gradients(read, first.tolist(), given)


def _pack_gradients(gradients: Gradients, like: Sequence[torch.Tensor]) -> torch.Tensor:
    rates = torch.tensor(list(gradients.rates), dtype=torch.float64)
    values = [
        torch.zeros_like(p) if v is None else v for v, p in zip(gradients.values, like, strict=True)
    ]
    mask = torch.tensor([v is not None for v in gradients.values], dtype=torch.uint8)
    return _pack([rates, *values, mask])


def _pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the tensors' bytes, one after the other, on the host."""
    flat = [tensor_bytes.raw(t.contiguous()) for t in tensors]
    if len({t.device for t in flat}) > 1:
        flat = [t.cpu() for t in flat]
    return torch.cat(flat).cpu()


def _unpack(body: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return new tensors as those in `like`, from their bytes."""
    parts = body.split([t.nbytes for t in like])
    # The copy is aligned for its dtype.
    return [
        part.clone().view(t.dtype).view(t.shape).to(t.device)
        for part, t in zip(parts, like, strict=True)
    ]
