"""What ranks run in the tests of mismatches: collectives that cannot meet, and many that can."""

import random
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from nbdist.engine.group import group
from nbdist.engine.group import state as group_state
from nbdist.engine.layout.parallelize import parallelize
from nbdist.engine.tap import tap
from nbdist.shared.errors import MismatchError
from tests.group.faults import held


def watch(level: str = "full") -> None:
    """Put the tap in place."""
    tap.install(level)


def _f32(count: int) -> torch.Tensor:
    return torch.ones(count)


# One rank, number 1, is odd: it does the second of two things.
_KINDS: dict[str, tuple[Any, Any]] = {
    "size": (lambda: dist.all_reduce(_f32(1000)), lambda: dist.all_reduce(_f32(1001))),
    "type": (
        lambda: dist.all_reduce(_f32(1000)),
        lambda: dist.all_reduce(torch.ones(500, dtype=torch.float64)),  # as many bytes
    ),
    "reduction": (
        lambda: dist.all_reduce(_f32(8)),
        lambda: dist.all_reduce(_f32(8), op=dist.ReduceOp.MAX),
    ),
    "root": (
        lambda: dist.broadcast(_f32(8), src=0),
        lambda: dist.broadcast(_f32(8), src=1),
    ),
    "kind": (lambda: dist.all_reduce(_f32(8)), lambda: dist.broadcast(_f32(8), src=0)),
    "barrier": (lambda: dist.all_reduce(_f32(1)), dist.barrier),
    "order": (
        lambda: (dist.all_reduce(_f32(4)), dist.all_reduce(_f32(9))),
        lambda: (dist.all_reduce(_f32(9)), dist.all_reduce(_f32(4))),
    ),
    "asynchronous": (
        lambda: [w.wait() for w in [_async(4), _async(5), _async(6)]],
        lambda: [w.wait() for w in [_async(4), _async(5), _async(7)]],
    ),
    "all_gather": (lambda: _gather(1000), lambda: _gather(1001)),
    "reduce_scatter": (lambda: _reduce_scatter(30), lambda: _reduce_scatter(36)),
}
KINDS = tuple(_KINDS)
# Rank 1 sends rank 0 another part than that one expects.
_PARTS: dict[str, tuple[Any, Any]] = {
    "too few": (lambda: _exchange_parts(2), lambda: _exchange_parts(1)),
    "too many": (lambda: _exchange_parts(2), lambda: _exchange_parts(9)),
    "splits and none": (lambda: _exchange_parts(None), lambda: _exchange_parts(3)),
    "equal parts": (lambda: _exchange_equal(6), lambda: _exchange_equal(12)),
    "wider rows": (lambda: _exchange_parts(2), lambda: _exchange_parts(2, width=3)),
    "functional": (lambda: _exchange_functional(2), lambda: _exchange_functional(1)),
    "differentiable": (lambda: _exchange_in_autograd(2), lambda: _exchange_in_autograd(3)),
    "lists": (lambda: _exchange_lists(2), lambda: _exchange_lists(3)),
}
PARTS = tuple(_PARTS)


# Rank 0 does the first of two things, rank 1 the second; others nothing.
_MESSAGES: dict[str, tuple[Any, Any]] = {
    "larger": (lambda: dist.send(_f32(9), 1), lambda: dist.recv(_f32(4), 0)),
    "smaller": (lambda: dist.send(_f32(4), 1), lambda: dist.recv(_f32(9), 0)),
    "type": (
        lambda: dist.send(_f32(8), 1),
        lambda: dist.recv(torch.ones(4, dtype=torch.float64), 0),
    ),
    "tag": (
        lambda: (dist.send(_f32(4), 1, tag=1), dist.send(_f32(9), 1, tag=2)),
        lambda: (dist.recv(_f32(4), 0, tag=1), dist.recv(_f32(8), 0, tag=2)),
    ),
    "asynchronous": (
        lambda: [w.wait() for w in [dist.isend(_f32(4), 1), dist.isend(_f32(5), 1)] if w],
        lambda: [w.wait() for w in [dist.irecv(_f32(4), 0), dist.irecv(_f32(4), 0)] if w],
    ),
    "batch": (
        lambda: _batch(dist.isend, 1, (3, 5)),
        lambda: _batch(dist.irecv, 0, (3, 4)),
    ),
    "object list": (
        lambda: dist.send_object_list(["a", "b"], 1),
        lambda: dist.recv_object_list([None], 0),
    ),
}
MESSAGES = tuple(_MESSAGES)


def _batch(operator: Any, peer: int, counts: tuple[int, ...]) -> None:
    works = dist.batch_isend_irecv([dist.P2POp(operator, _f32(c), peer) for c in counts])
    for work in works:
        work.wait()


def send_badly(kind: str, seed: int) -> dict[str, Any]:
    """Send from rank 0 what rank 1 has no tensor for, in an order that follows from `seed`."""
    rank = dist.get_rank()
    if rank > 1:
        return {"error": None}
    time.sleep(0.05 if seed % 3 == rank else 0)
    return outcome(_MESSAGES[kind][rank])


def send_to_last() -> None:
    """Send what can meet from rank 1 to rank 2; rank 0 has used the group for nothing then."""
    rank = dist.get_rank()
    if rank == 1:
        dist.send(_f32(3), 2)
    elif rank == 2:
        dist.recv(_f32(3), 1)


def begin_anew(way: str) -> None:
    """Let all counts begin anew, as after a fault, or destroy the group and make it again."""
    if way == "counts":
        tap.reset_counts()
    else:
        dist.destroy_process_group()
        dist.init_process_group("gloo")


def exchange(rounds: int) -> str:
    """Send all that can meet around a ring, by every way there is; tags in the reverse order."""
    rank, n = dist.get_rank(), dist.get_world_size()
    after, before = (rank + 1) % n, (rank - 1) % n
    for turn in range(rounds):
        sent = [dist.isend(_f32(turn + tag), after, tag=tag) for tag in range(4)]
        inbox = [torch.zeros(turn + tag) for tag in range(4)]
        got = [dist.irecv(inbox[tag], before, tag=tag) for tag in reversed(range(4))]
        for work in (*sent, *got):
            assert work is not None
            work.wait()
        assert all(bool(tensor.eq(1).all()) for tensor in inbox)
        both = [
            dist.P2POp(dist.isend, _f32(turn + 1), after),
            dist.P2POp(dist.irecv, torch.zeros(turn + 1), before),
        ]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        box: list[Any] = [None, None]
        if rank == 0:
            dist.send_object_list(["x" * turn, turn], 1)
        elif rank == 1:
            dist.recv_object_list(box, 0)
            assert box == ["x" * turn, turn]
        if rank == 0:
            for _ in range(n - 1):
                dist.recv(torch.zeros(2), tag=9)
        else:
            dist.send(_f32(2), 0, tag=9)
    return "all came"


def _async(count: int) -> Any:
    return dist.all_reduce(_f32(count), async_op=True)


def _gather(count: int) -> None:
    dist.all_gather_into_tensor(_f32(count * dist.get_world_size()), _f32(count))


def _reduce_scatter(count: int) -> None:
    dist.reduce_scatter_tensor(_f32(count // dist.get_world_size()), _f32(count))


def _splits(to_first: int | None) -> tuple[list[int] | None, list[int] | None, torch.Tensor]:
    """Return output splits of 2 from each rank, input splits of 2 to all but the first, an input.

    No splits for None.
    """
    n = dist.get_world_size()
    if to_first is None:
        return None, None, _f32(2 * n)
    # What a rank sends itself may be anything, and is expected.
    sent = [to_first, *[2] * (n - 1)]
    expected = [to_first if dist.get_rank() == 0 else 2, *[2] * (n - 1)]
    return expected, sent, _f32(sum(sent))


def _exchange_parts(to_first: int | None, width: int = 1) -> None:
    expected, sent, given = _splits(to_first)
    n = 2 * dist.get_world_size() if expected is None else sum(expected)
    dist.all_to_all_single(
        torch.zeros(n, width), given.expand(width, -1).t().contiguous(), expected, sent
    )


def _exchange_equal(count: int) -> None:
    n = dist.get_world_size()
    dist.all_to_all_single(torch.zeros(count * n), _f32(count * n))


def _exchange_functional(to_first: int) -> None:
    from torch.distributed import _functional_collectives as functional

    expected, sent, given = _splits(to_first)
    world = dist.group.WORLD
    assert world is not None
    functional.wait_tensor(functional.all_to_all_single(given, expected, sent, world))


def _exchange_in_autograd(to_first: int) -> None:
    from torch.distributed.nn.functional import all_to_all_single

    expected, sent, given = _splits(to_first)
    assert expected is not None
    all_to_all_single(torch.zeros(sum(expected)), given, expected, sent)


def _exchange_lists(count: int) -> None:
    n = dist.get_world_size()
    dist.all_to_all([torch.zeros(count)] * n, [_f32(count)] * n)


def exchange_parts(rounds: int) -> str:
    """Send parts of random sizes, none of them alike, as the receivers were told; in two ways."""
    rank, n = dist.get_rank(), dist.get_world_size()
    own, alike = random.Random(rank), random.Random(7)
    for _round in range(rounds):
        sent = [own.choice((0, 1, 2, 5)) for _ in range(n)]
        counts = torch.zeros(n, dtype=torch.int64)
        dist.all_to_all_single(counts, torch.tensor(sent))
        expected = counts.tolist()
        out = torch.full((sum(expected), 3), -1.0)
        dist.all_to_all_single(out, torch.full((sum(sent), 3), float(rank)), expected, sent)
        assert out[:, 0].tolist() == [float(r) for r in range(n) for _ in range(expected[r])]
        works = []
        for _ in range(20):  # some ranks give splits for equal parts, the others none
            part = alike.randrange(4)
            given = [part] * n if own.random() < 0.5 else None
            out = torch.zeros(part * n)
            works.append(dist.all_to_all_single(out, _f32(part * n), given, given, async_op=True))
        for work in works:
            work.wait()
    return "all came"


def meet_badly(kind: str, seed: int) -> dict[str, Any]:
    """Do what one rank does otherwise; the ranks come in an order that follows from `seed`."""
    time.sleep(random.Random(f"{seed} {dist.get_rank()}").choice((0, 0, 0.002)))
    return outcome((_KINDS | _PARTS)[kind][dist.get_rank() == 1])


def outcome(action: Any) -> dict[str, Any]:
    """Return how an action ended."""
    try:
        action()
    except MismatchError as error:
        return {"error": "MismatchError", "text": str(error)}
    except Exception as error:
        return {"error": type(error).__name__, "released": group.was_released(error)}
    return {"error": None}


def meet_badly_in(place: str) -> dict[str, Any]:
    """Let DDP or FSDP2 send what rank 1's peers do not expect."""
    return outcome(lambda: _PLACES[place](dist.get_rank() == 1))


def _buffer_at_construction(is_odd: bool) -> None:
    model = nn.Linear(4, 4)
    model.register_buffer("seen", torch.zeros(7 if is_odd else 5))
    nn.parallel.DistributedDataParallel(model)


def _bucket_in_backward(is_odd: bool) -> None:
    model: nn.Module = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    # With this DDP makes its buckets at once; else one for all, and the next by rank 0's.
    model = nn.parallel.DistributedDataParallel(
        model, bucket_cap_mb=0.0004 if is_odd else 25, find_unused_parameters=True
    )
    model(torch.ones(2, 16)).sum().backward()


def _shard(is_odd: bool, **options: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model: nn.Module = nn.Linear(32 if is_odd else 16, 16)
    fully_shard(model, **options)
    return model


def _unshard_in_forward(is_odd: bool) -> None:
    _shard(is_odd)(torch.ones(2, 32 if is_odd else 16))


def _gradients_in_backward(is_odd: bool) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    dtype = torch.float64 if is_odd else None
    model = _shard(False, mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
    model(torch.ones(2, 16)).sum().backward()


class Experts(nn.Module):
    """Two layers of one size, of which the input takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.expert = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: torch.Tensor, taken: int) -> torch.Tensor:
        out: torch.Tensor = self.expert[taken](x)
        return out


def _experts_of_one_unit(is_odd: bool) -> None:
    model = Experts()
    parallelize(model, "zero2")
    model(torch.ones(2, 16), int(is_odd)).sum().backward()


def _experts_of_two_units(is_odd: bool) -> None:
    from torch.distributed.fsdp import fully_shard

    model = Experts()
    for unit in (*model.expert, model):
        fully_shard(unit)
    model(torch.ones(2, 16), int(is_odd))


def _mode(is_odd: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
    parallelize(model, "ddp")
    for has_own_mode in (False, is_odd):
        model.train(not has_own_mode)
        model(torch.randn(8, 4)).sum().backward()


_PLACES = {
    "a mode": _mode,
    "DDP's construction": _buffer_at_construction,
    "DDP's backward": _bucket_in_backward,
    "FSDP2's forward": _unshard_in_forward,
    "FSDP2's backward": _gradients_in_backward,
    "gradients of other parameters": _experts_of_one_unit,
    "other parameters": _experts_of_two_units,
}
PLACES = tuple(_PLACES)


def refused_arguments() -> str:
    """Let the backend refuse a collective on every rank, then make a good one of another size."""
    try:
        dist.all_reduce(torch.ones(5), op=dist._make_nccl_premul_sum(2.0))
    except NotImplementedError:
        pass
    else:
        raise AssertionError("the tap let it pass")
    dist.all_reduce(torch.ones(3))
    return "fine"


def mix(rounds: int) -> int:
    """Train with DDP and FSDP2, and send much else, in several groups; return how many."""
    from torch.distributed.fsdp import fully_shard

    watch()
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    groups = [dist.group.WORLD, dist.new_group(range(n)), dist.new_group([0, n - 1])]
    mine = [g for g in groups if g is not None and dist.get_rank(g) >= 0]
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(16, 16), bucket_cap_mb=0.0002)
    sharded = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    fully_shard(sharded)
    both: tuple[nn.Module, ...] = (ddp, sharded)
    plan = random.Random(7)  # the same on all ranks
    for turn in range(rounds):
        for model in both:
            model(torch.randn(4, 16)).sum().backward()
        works = [
            dist.all_reduce(torch.ones(plan.randrange(1, 99)), async_op=True, group=g)
            for _ in range(20)
            for g in mine[:2]
        ]
        if len(mine) == 3:
            works += [dist.broadcast(torch.ones(turn + 1), 0, group=mine[2], async_op=True)] * 2
        for work in works:
            work.wait()
        if turn % 10 == 0:
            objects: list[Any] = [None] * n
            dist.all_gather_object(objects, "x" * plan.randrange(1, 2000))
            split = [1] * n
            split[0] = 1 + turn % 3 if rank == 0 else 1
            out = torch.ones(sum(split))
            dist.all_to_all_single(out, torch.ones(sum(split)), split, split)
            dist.gather(torch.ones(3), [torch.ones(3)] * n if rank == 1 else None, dst=1)
            dist.scatter(torch.ones(2), [torch.ones(2)] * n if rank == 0 else None, src=0)
            dist.barrier()
            dist.monitored_barrier()
            if rank == 0:
                dist.send(torch.ones(turn + 1), 1)
            elif rank == 1:
                dist.recv(torch.ones(turn + 1), 0)
            temporary = dist.new_group(range(n))
            for count in range(turn % 4):
                dist.all_reduce(torch.ones(count + turn), group=temporary)
            dist.destroy_process_group(temporary)
    return sum(tap.counts().values())


def messages() -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Send along a line of ranks; return collectives, messages sent and received."""
    rank, n = dist.get_rank(), dist.get_world_size()
    for _ in range(2):
        if rank > 0:
            dist.recv(torch.ones(3), rank - 1)
        if rank < n - 1:
            dist.send(torch.ones(3), rank + 1)
    dist.barrier()
    return tap.counts(), tap.sent(), tap.received()


def make_worker_write() -> list[list[int]]:
    """Fork, as a DataLoader does, and let the child use the tap's books; return the counts."""
    import os

    dist.barrier()
    child = os.fork()
    if child == 0:
        from nbdist.engine.tap.counters import book_of

        world = dist.group.WORLD
        assert world is not None
        os._exit(0 if book_of(world).channel is None else 1)
    _, status = os.waitpid(child, 0)
    held["forked"] = True
    return [[os.waitstatus_to_exitcode(status)], list(tap.counts().values())]


def shared_files() -> list[str]:
    """Return what this process holds open or mapped of files that exist by name for sharing."""
    import pathlib

    return [str(p) for p in pathlib.Path("/dev/shm").glob("nbdist*")]


def count_keys(collectives: int) -> int:
    """Make so many collectives; return how many keys the store holds when all ranks have."""
    for _ in range(collectives):
        dist.all_reduce(torch.ones(3))
    table = group_state.here.store()
    dist.barrier()
    keys: int = table.num_keys()
    dist.barrier()
    return keys


def wait_alone() -> dict[str, Any]:
    """Call what the other ranks never call; return how that ended."""
    return outcome(lambda: dist.all_reduce(_f32(8)))


def state() -> dict[str, Any]:
    """Return what this rank says that it waits in."""
    from nbdist.engine.rank import control

    answer = control.state()
    return {"doing": answer["doing"], "waiting": answer["waiting"]}


def time_per_all_reduce(collectives: int) -> float:
    """Return the seconds that one small all_reduce takes."""
    began = time.perf_counter()
    for _ in range(collectives):
        dist.all_reduce(torch.ones(3))
    return (time.perf_counter() - began) / collectives
