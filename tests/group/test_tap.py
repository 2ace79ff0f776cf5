"""What the tap sees of collectives, on real gloo groups."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from nbdist.shared.packed import CALL
from tests.group.harness import run_ranks, try_ranks

if TYPE_CHECKING:
    import torch.distributed as dist


def install_tap(level: str = "full") -> Any:
    from nbdist.engine.tap import tap

    tap.install(level)
    return tap


def finish(work: dist.Work | None) -> None:
    assert work is not None, "this rank is not in the group"
    work.wait()


def _all_ops() -> dict[str, Any]:
    """Call every collective of the Python API once; return what they gave."""
    import torch
    import torch.distributed as dist

    rank, n = dist.get_rank(), dist.get_world_size()
    mine = torch.arange(4.0) + 10 * rank
    got: dict[str, Any] = {}

    def keep(name: str, *tensors: Any) -> None:
        got[name] = [t.tolist() for t in tensors]

    x = mine.clone()
    dist.all_reduce(x)
    keep("all_reduce", x)
    x = mine.clone()
    dist.all_reduce(x, op=dist.ReduceOp.MAX, async_op=True).wait()
    keep("all_reduce max", x)
    x, y = mine.clone(), mine.clone()
    dist.all_reduce_coalesced([x, y], async_op=False)
    keep("all_reduce_coalesced", x, y)
    x = mine.clone()
    dist.broadcast(x, src=1)
    keep("broadcast", x)
    x = mine.clone()
    dist.reduce(x, dst=0)
    keep("reduce", *([x] if rank == 0 else []))
    parts = [torch.empty(4) for _ in range(n)]
    dist.all_gather(parts, mine)
    keep("all_gather", *parts)
    out = torch.empty(4 * n)
    dist.all_gather_into_tensor(out, mine)
    keep("all_gather_into_tensor", out)
    lists = [[torch.empty(4)] for _ in range(n)]
    dist.all_gather_coalesced(lists, [mine]) if n == 1 else None
    out = torch.empty(4)
    dist.reduce_scatter_tensor(out, torch.arange(4.0 * n) + rank)
    keep("reduce_scatter_tensor", out)
    work = dist.reduce_scatter_tensor(out, torch.arange(4.0 * n) * 2 + rank, async_op=True)
    work.wait()
    keep("reduce_scatter_tensor async", out)
    dist.reduce_scatter(out, [mine + i for i in range(n)])
    keep("reduce_scatter", out)
    gathered = [torch.empty(4) for _ in range(n)] if rank == 0 else None
    dist.gather(mine, gathered, dst=0)
    keep("gather", *(gathered or []))
    dist.scatter(out, [mine + i for i in range(n)] if rank == 0 else None, src=0)
    keep("scatter", out)
    out = torch.empty(2 * n)
    dist.all_to_all_single(out, torch.arange(2.0 * n) + 100 * rank)
    keep("all_to_all_single", out)
    outs = [torch.empty(2) for _ in range(n)]
    dist.all_to_all(outs, [torch.ones(2) * (10 * rank + i) for i in range(n)])
    keep("all_to_all", *outs)
    if rank == 0:
        dist.send(mine, dst=1)
        finish(dist.isend(mine * 2, dst=1))
        dist.send(mine * 3, dst=1)
    elif rank == 1:
        x, y, z = torch.empty(4), torch.empty(4), torch.empty(4)
        dist.recv(x, src=0)
        finish(dist.irecv(y, src=0))
        dist.recv(z)
        keep("recv", x, y, z)
    dist.barrier()
    objects: list[Any] = [None] * n
    dist.all_gather_object(objects, {"rank": rank})
    got["objects"] = objects
    return got


def _functional() -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives as funcol

    rank, n = dist.get_rank(), dist.get_world_size()
    mine = torch.arange(4.0) + 10 * rank
    group = dist.group.WORLD
    assert group is not None
    got = {
        "all_reduce": funcol.all_reduce(mine, "sum", group),
        "all_gather": funcol.all_gather_tensor(mine, 0, group),
        "reduce_scatter": funcol.reduce_scatter_tensor(mine.repeat(n), "sum", 0, group),
        "broadcast": funcol.broadcast(mine, 0, group),
        "all_to_all": funcol.all_to_all_single(mine.repeat(n), None, None, group),
    }
    two = funcol.all_gather_into_tensor_coalesced([mine, mine * 2], group)
    got["all_gather_coalesced 0"], got["all_gather_coalesced 1"] = two
    two = funcol.reduce_scatter_tensor_coalesced(
        [mine.repeat(n), mine.repeat(n) * 2], "sum", [0, 0], group
    )
    got["reduce_scatter_coalesced 0"], got["reduce_scatter_coalesced 1"] = two
    two = funcol.all_reduce_coalesced([mine, mine * 2], "sum", group)
    got["all_reduce_coalesced 0"], got["all_reduce_coalesced 1"] = two
    return {name: (value + 0).tolist() for name, value in got.items()}


def _with_and_without(level: str) -> tuple[Any, Any, dict[str, int]]:
    bare = [_all_ops(), _functional()]
    tap = install_tap(level)
    tapped = [_all_ops(), _functional()]
    counts = tap.counts()
    tap.set_level("off")
    again = [_all_ops(), _functional()]
    assert again == bare
    assert tap.counts() == counts
    return bare, tapped, counts


@pytest.mark.parametrize("level", ["counts", "full"])
def test_every_collective_gives_the_same_with_the_tap(level: str) -> None:
    outcomes = run_ranks(2, _with_and_without, level)
    for bare, tapped, _ in outcomes:
        assert tapped == bare
    assert outcomes[0][2] == outcomes[1][2]
    (count,) = outcomes[0][2].values()
    assert count >= 20


def _unnamed() -> list[str]:
    import torch.distributed as dist

    from nbdist.engine.compat.torch_hooks import check, collective_ops
    from nbdist.engine.tap import collective_check
    from nbdist.engine.tap.ops import OPS

    assert check() == []
    for number, name in enumerate(collective_check.REDUCTIONS):
        assert int(getattr(dist.ReduceOp, name)) == number
    return sorted(collective_ops() - set(OPS))


def test_the_table_names_every_c10d_operator_of_this_torch() -> None:
    assert run_ranks(1, _unnamed) == [[]]


def _count_groups() -> tuple[dict[str, int], dict[str, int], str]:
    import torch
    import torch.distributed as dist

    tap = install_tap("counts")
    pair = dist.new_group([0, 1])
    tap.reset_counts()
    for _ in range(3):
        dist.all_reduce(torch.ones(2))
    dist.broadcast(torch.ones(2), src=0, group=pair)
    before = tap.counts()
    tap.reset_counts()
    return before, tap.counts(), tap.last_kind()


def test_counts_are_kept_per_group_until_the_group_is_formed_anew() -> None:
    for before, after, last in run_ranks(2, _count_groups):
        assert sorted(before.values()) == [1, 3]
        assert set(after.values()) == {0}
        assert last == "broadcast"


def _traffic() -> Any:
    import torch
    import torch.distributed as dist

    tap = install_tap("full")
    dist.barrier()
    tap.take()
    dist.all_reduce(torch.ones(256))
    work = dist.all_reduce(torch.ones(256), async_op=True)
    work.wait()
    first = tap.take()
    return first, tap.take()


def test_traffic_adds_up_bytes_and_collectives_and_begins_anew() -> None:
    for first, second in run_ranks(2, _traffic):
        assert (first.bytes, first.collectives, first.untimed) == (2048, 2, 0)
        assert first.exposed_ns > 0
        assert first.total_ns > 0
        assert (second.bytes, second.collectives, second.exposed_ns, second.total_ns) == (0,) * 4


def _functional_reduce_scatters() -> tuple[int, int, int]:
    import gc

    import torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives as funcol

    tap = install_tap("full")
    group = dist.group.WORLD
    assert group is not None
    for _ in range(100):
        x = funcol.reduce_scatter_tensor(torch.ones(12_345), "sum", 0, [0])
        _ = x + 1
    waited = tap.take().untimed
    out = torch.empty(12_345)
    for _ in range(200):
        dist.reduce_scatter_tensor(out, torch.ones(12_345), async_op=True)
    dist.barrier()
    del x, _
    gc.collect()
    held = sum(isinstance(o, torch.Tensor) and o.numel() == 12_345 for o in gc.get_objects())
    return waited, tap.take().collectives, held


def test_collectives_that_do_not_tell_their_end_hold_few_tensors() -> None:
    ((waited, collectives, held),) = run_ranks(1, _functional_reduce_scatters)
    assert waited == 0
    assert collectives == 201
    assert held < 70


def _see_waiting(how: str) -> Any:
    import torch
    import torch.distributed as dist

    tap = install_tap("full")
    if dist.get_rank() == 1:
        # Comes only when rank 0 has been seen waiting.
        store = dist.distributed_c10d._get_default_store()
        store.wait(["seen"])
        dist.all_reduce(torch.ones(3))
        return None
    store = dist.distributed_c10d._get_default_store()
    seen: list[Any] = []

    def look() -> None:
        while not seen:
            waiting = tap.waiting()
            if waiting is not None and waiting.seconds > 0.05:
                seen.append(waiting.to_wire())
        store.set("seen", "1")

    thread = threading.Thread(target=look)
    thread.start()
    code = {
        "sync": "dist.all_reduce(torch.ones(3))",
        "async": "work = dist.all_reduce(torch.ones(3), async_op=True)\nwork.wait()",
    }[how]
    exec(compile(f"# a cell\n{code}", "/tmp/ipykernel_1/cell.py", "exec"), {**locals()})
    thread.join()
    assert tap.waiting() is None
    return seen[0]


@pytest.mark.parametrize("how", ["sync", "async"])
def test_another_thread_sees_what_the_main_thread_waits_in(how: str) -> None:
    waiting = run_ranks(2, _see_waiting, how)[0]
    assert waiting["kind"] == "all_reduce"
    assert (waiting["seq"], waiting["bytes"]) == (1, 12)
    assert waiting["line"] == "/tmp/ipykernel_1/cell.py:2"
    assert waiting["is_certain"] is True


def _peer_dies(level: str) -> str:
    import os

    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(1))
    if level != "off":
        install_tap(level)
    if dist.get_rank() == 1:
        os._exit(1)
    try:
        dist.all_reduce(torch.ones(1))
    except Exception as error:
        return type(error).__name__
    return "no error"


def test_a_collective_that_fails_raises_the_same_error_with_the_tap() -> None:
    names = {level: try_ranks(2, _peer_dies, level)[0].value for level in ("off", "counts", "full")}
    assert len(set(names.values())) == 1
    assert names["off"] != "no error"


def _messages_of_a_gpu(level: str) -> list[dict[str, str]]:
    """Call each message's operator as the dispatcher does with tensors on a GPU."""
    import torch
    import torch.distributed as dist

    tap = install_tap(level)
    on_gpu = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    ops: Any = torch.ops.c10d
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    wrapped = dist.new_group()
    found: list[dict[str, str]] = []
    groups: tuple[Any, ...] = (dist.group.WORLD, wrapped)
    for group in groups:
        found.append({})
        for name, at in {"send": (1, 7), "recv_": (1, 7), "recv_any_source_": (7,)}.items():
            try:
                getattr(ops, name).default.redispatch(on_gpu, [torch.ones(2)], group.boxed(), *at)
            except Exception as error:
                found[-1][name] = str(error).splitlines()[0]
    assert not tap.sent()
    dist.all_reduce(torch.ones(1))  # the group is as it was
    return found


@pytest.mark.parametrize("level", ["off", "counts", "full"])
def test_gloo_is_given_no_message_of_a_gpu_at_any_level(level: str) -> None:
    said = "A {} of a tensor on the GPU was refused, for this group's backend is gloo."
    kinds = {"send": "send", "recv_": "recv", "recv_any_source_": "recv"}
    refused = {name: said.format(kind) for name, kind in kinds.items()}
    for found in run_ranks(2, _messages_of_a_gpu, level):
        assert found == [refused, refused]  # of a group, and of one that torch debugs


class _BusyGpu:
    """Stands for a GPU on which others compute: an event on an empty stream does not pass soon."""

    def mark(self, device: Any) -> Any:
        return self

    mark_alone = mark

    def query(self) -> bool:
        return False

    def stream(self, device: Any) -> int:
        return 0

    def can_mark(self) -> bool:
        return True


def _step_on_a_busy_gpu() -> tuple[int, dict[str, int], bool]:
    """Make a step of DDP and some collectives, each with what carries it out on a GPU."""
    import torch
    import torch.distributed as dist

    from nbdist.engine.tap import in_flight, tap
    from nbdist.engine.tap.cuda_times import CudaTimes

    kernel = tap._kernel
    tap._kernel = lambda op, device_type, *, is_full: kernel(op, "cuda", is_full=is_full)
    in_flight.state.cuda = CudaTimes(_BusyGpu())  # type: ignore[arg-type]
    tap.install("full")
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(10, 100, bias=False))
    n = dist.get_world_size()
    templates: dict[int, Any] = {}
    tap.begin_cell()
    tap.take(0)
    for step in (1, 2, 3):  # DDP lays its buckets anew after the first
        tap.backward_began()
        model(torch.ones(3, 10)).sum().backward()
        tap.backward_ended()
        dist.all_gather_into_tensor(torch.empty(n * 1000), torch.ones(1000))
        dist.reduce_scatter_tensor(torch.empty(1000), torch.ones(n * 1000))
        dist.broadcast(torch.ones(10), 0, async_op=True).wait()
        traffic = tap.take(step)
        assert traffic.calls is not None
        templates |= traffic.calls.new
        flat = traffic.calls.calls.tolist()
    kinds: dict[str, int] = {}
    for at in range(0, len(flat), len(CALL)):
        one = templates[flat[at]]
        kinds[one.kind] = kinds.get(one.kind, 0) + one.bytes
        assert flat[at + 3] <= flat[at + 4]
    return traffic.collectives, kinds, (traffic.total_ns or 0) > 0


def test_what_gloo_sends_of_tensors_on_a_busy_gpu_is_told_by_the_hosts_clock() -> None:
    """With a stand-in for the GPU's events, and tensors of the CPU in the tap's GPU kernels."""
    told = {"all_reduce": 4000, "all_gather": 4000, "reduce_scatter": 8000, "broadcast": 40}
    for found in run_ranks(2, _step_on_a_busy_gpu):
        assert found == (4, told, True)


def _premul() -> str:
    import torch
    import torch.distributed as dist

    install_tap("full")
    try:
        dist.all_reduce(torch.ones(1), op=dist._make_nccl_premul_sum(2.0))
    except NotImplementedError as error:
        return str(error)
    return ""


def test_the_one_reduction_that_cannot_pass_says_what_to_do() -> None:
    assert "c.NBDist.tap = 'off'" in run_ranks(1, _premul)[0]


def _swap() -> list[float]:
    """Put a new backend into the group, as recovery does, and go on."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    tap = install_tap("full")
    got = []
    store = dist.distributed_c10d._get_default_store()
    for slot in (10, 11):
        x = torch.ones(1)
        dist.all_reduce(x)
        got.append(x.item())
        group = dist.group.WORLD
        assert group is not None
        new = dist.ProcessGroupGloo(
            dist.PrefixStore(f"g{slot}", store), dist.get_rank(), 2, timedelta(seconds=20)
        )
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType(slot), new)
        tap.reset_counts()
    x = torch.ones(1)
    dist.all_reduce(x)
    assert list(tap.counts().values()) == [1]
    return [*got, x.item()]


def test_collectives_go_through_a_backend_that_was_put_in_later() -> None:
    assert run_ranks(2, _swap) == [[2.0, 2.0, 2.0]] * 2


def rows_of(body: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    """Return the rows of one step that `body` is, and what it returned."""
    import torch.distributed as dist

    tap = install_tap("full")
    dist.barrier()
    tap.take()
    value = body(*args)
    dist.barrier()
    calls = tap.take(1).calls
    assert calls is not None
    return calls, value


def decoded(calls: Any) -> list[tuple[Any, int, int, int, int]]:
    """Return the template, number and moments of each row, in the order of the numbers."""
    flat = calls.calls.tolist()
    rows = [flat[i : i + len(CALL)] for i in range(0, len(flat), len(CALL))]
    return sorted(((calls.new[at], *rest) for at, *rest, _ in rows), key=lambda row: row[2])


def _sub_groups() -> None:
    import torch
    import torch.distributed as dist

    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1], group_desc="low"), dist.new_group([2, 3], group_desc="high")]
    code = "# a cell\ndist.all_reduce(torch.ones(8, dtype=torch.int32), group=group)\n"
    exec(
        compile(code, "/tmp/ipykernel_1/rows.py", "exec"),
        {"dist": dist, "torch": torch, "group": pairs[rank // 2]},
    )


def _sub_group_rows() -> Any:
    from nbdist.engine.kernel import location

    location.here.name_cell("/tmp/ipykernel_1/rows.py", 7)
    return decoded(rows_of(_sub_groups)[0])


def test_a_row_of_a_sub_group_tells_the_group_its_ranks_and_the_line() -> None:
    for rank, rows in enumerate(run_ranks(4, _sub_group_rows)):
        (found,) = [row for row in rows if row[0].kind == "all_reduce"]
        template, number, launch, begin, end = found
        assert template.title == ("group low", "group high")[rank // 2]
        assert template.ranks == ((0, 1), (2, 3))[rank // 2]
        assert (template.bytes, template.dtype, template.peer) == (32, "int32", None)
        assert template.line == "cell 7, line 2"
        assert number == 1
        assert launch <= begin <= end


def _messages() -> None:
    import torch
    import torch.distributed as dist

    for _ in range(2):
        if dist.get_rank() == 0:
            dist.send(torch.ones(5), dst=1)
        else:
            dist.recv(torch.empty(5), src=0)
    if dist.get_rank() == 0:
        finish(dist.isend(torch.ones(7), dst=1))
    else:
        finish(dist.irecv(torch.empty(7), src=0))


def _message_rows() -> Any:
    return decoded(rows_of(_messages)[0])


def test_messages_are_numbered_by_peer_and_told_with_it() -> None:
    for rank, rows in enumerate(run_ranks(2, _message_rows)):
        found = [row for row in rows if row[0].kind != "barrier"]
        assert [row[0].kind for row in found] == [("send", "recv")[rank]] * 3
        assert [(row[0].bytes, row[0].peer, row[1]) for row in found] == [
            (20, 1 - rank, 1),
            (20, 1 - rank, 2),
            (28, 1 - rank, 3),
        ]
        assert all(launch <= begin <= end for _, _, launch, begin, end in found)


def _tagged() -> None:
    """Three messages; the receives are launched in another order than the sends."""
    import torch
    import torch.distributed as dist

    if dist.get_rank() == 0:
        works = [dist.isend(torch.ones(n), dst=1, tag=tag) for n, tag in ((1, 3), (2, 4), (3, 3))]
    else:
        works = [dist.irecv(torch.empty(n), src=0, tag=tag) for n, tag in ((2, 4), (1, 3), (3, 3))]
    for work in works:
        finish(work)


def _tagged_rows() -> Any:
    from nbdist.engine.tap import tap

    rows = decoded(rows_of(_tagged)[0])
    return rows, tap.sent(), tap.received()


def test_messages_with_tags_out_of_order_have_the_number_of_what_they_meet() -> None:
    ranks = run_ranks(2, _tagged_rows)
    for rank, (rows, sent, received) in enumerate(ranks):
        found = {(row[0].bytes, row[0].tag, row[1]) for row in rows if row[0].kind != "barrier"}
        assert found == {(4, 3, 1), (8, 4, 1), (12, 3, 2)}
        counted = sent if rank == 0 else received  # by peer alone: what recovery compares
        assert list(counted.values()) == [3]


def _functional_calls() -> None:
    import torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives as funcol

    group = dist.group.WORLD
    assert group is not None
    _ = funcol.all_reduce(torch.ones(4), "sum", group) + 1
    _ = funcol.all_gather_tensor(torch.ones(4), 0, group) + 1
    _ = funcol.reduce_scatter_tensor(torch.ones(4), "sum", 0, group) + 1
    dist.monitored_barrier()


def _functional_rows() -> Any:
    return decoded(rows_of(_functional_calls)[0])


def test_functional_collectives_and_barriers_are_told() -> None:
    for rows in run_ranks(2, _functional_rows):
        kinds = [(row[0].kind, row[0].bytes) for row in rows]
        assert kinds == [
            ("all_reduce", 16),
            ("all_gather", 16),
            ("reduce_scatter", 16),
            ("monitored_barrier", 0),
            ("barrier", 0),
        ]
        assert [row[1] for row in rows] == [
            2,
            3,
            4,
            5,
            6,
        ]  # a barrier came first


def _ends_told() -> list[int]:
    """Take steps that have ended at chosen moments; return the moments that their calls tell."""
    import torch
    import torch.distributed as dist

    tap = install_tap("full")
    tap.take()
    told = []
    for step in (1, 2):
        dist.all_reduce(torch.ones(2))
        told.append(tap.take(step, end_ns=1000 * step).calls.end_ns)
    return told


def test_a_steps_calls_tell_when_it_was_over_however_late_they_are_taken() -> None:
    assert run_ranks(1, _ends_told)[0] == [1000, 2000]


def _across_steps() -> list[list[tuple[str, int, int]]]:
    """An operation that is launched in one step and ends in the next."""
    import torch
    import torch.distributed as dist

    tap = install_tap("full")
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    tap.take()
    if dist.get_rank() == 1:
        store.wait(["taken"])
    work = dist.all_reduce(torch.ones(2), async_op=True)
    first = tap.take(1)
    store.set("taken", "1")
    work.wait()
    second, third = tap.take(2), tap.take(3)
    new = {**first.calls.new, **second.calls.new}
    return [
        [(new[at].kind, number, traffic.collectives) for at, number in _pairs(traffic.calls)]
        for traffic in (first, second, third)
    ]


def _pairs(calls: Any) -> list[tuple[int, int]]:
    flat = calls.calls.tolist()
    return [(flat[i], flat[i + 1]) for i in range(0, len(flat), len(CALL))]


def test_what_ends_after_its_step_is_told_once_with_the_next() -> None:
    assert run_ranks(2, _across_steps)[0] == [[], [("all_reduce", 2, 0)], []]


def _untold_steps() -> tuple[int, int, int, bool, int]:
    """Run so many short steps that not all are told."""
    import torch
    import torch.distributed as dist

    from nbdist.engine.tap import in_flight

    tap = install_tap("full")
    x = torch.ones(1)
    rows = skipped = collectives = 0
    timed = []
    for step in range(1, 3001):
        dist.all_reduce(x)
        dist.all_reduce(x, async_op=True).wait()
        traffic = tap.take(step)
        collectives += traffic.collectives
        timed.append((traffic.calls is not None) == (traffic.total_ns is not None))
        if traffic.calls is not None:
            rows += len(traffic.calls.calls) // len(CALL)
            skipped += traffic.calls.skipped
    return rows, skipped, collectives, all(timed), in_flight.state.stride.every


def test_of_many_short_steps_some_are_told_and_all_are_counted() -> None:
    ((rows, skipped, collectives, are_timed, stride),) = run_ranks(1, _untold_steps)
    assert collectives == 6000
    assert rows < 3000
    # What came after the last told step is told with the next one: gaps are at most three strides.
    assert collectives - 2 * 3 * stride <= rows + skipped <= collectives
    assert are_timed


def _named_waits(how: str) -> Any:
    """Rank 0 waits for the second of two launches; a thread sees which."""
    import torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives as funcol

    tap = install_tap("full")
    store = dist.distributed_c10d._get_default_store()
    group = dist.group.WORLD
    assert group is not None
    if dist.get_rank() == 1:
        store.wait(["seen"])
    if how == "tensor":
        first: Any = funcol.all_reduce(torch.ones(3), "sum", group)
        second: Any = funcol.all_gather_tensor(torch.ones(5), 0, group)
        third = funcol.all_reduce(torch.ones(9), "sum", group)
    elif how == "work":
        first = dist.all_reduce(torch.ones(3), async_op=True)
        second = dist.broadcast(torch.ones(5), src=1, async_op=True)
        third = dist.all_reduce(torch.ones(9), async_op=True)
    else:
        first = dist.all_reduce(torch.ones(3), async_op=True)
        second = dist.reduce_scatter_tensor(torch.empty(5), torch.ones(10), async_op=True)
        third = dist.all_reduce(torch.ones(9), async_op=True)
    if dist.get_rank() == 1:
        return None
    seen: list[Any] = []

    def look() -> None:
        while not seen:
            waiting = tap.waiting()
            if waiting is not None and waiting.seconds > 0.05:
                seen.append((waiting.kind, waiting.bytes, waiting.seq))
        store.set("seen", "1")

    thread = threading.Thread(target=look)
    thread.start()
    for one in (second, first, third):
        one.wait()
    thread.join()
    return seen[0]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("tensor", ("all_gather", 20, 2)),
        ("work", ("broadcast", 20, 2)),
        ("reduce-scatter", ("reduce_scatter", 40, 2)),
    ],
)
def test_the_operation_that_is_waited_for_is_named_and_not_the_oldest(
    how: str, expected: tuple[str, int, int]
) -> None:
    assert run_ranks(2, _named_waits, how)[0] == expected


def _many_messages(on_a_thread: bool) -> tuple[int, int]:
    """Exchange 40 times 128 messages; return how many tensors live, and launches under way."""
    import gc

    import torch
    import torch.distributed as dist

    tap = install_tap("full")
    rank, size = dist.get_rank(), 12_345

    def exchange() -> None:
        for _ in range(40):
            kept = [torch.ones(size) for _ in range(128)]
            works = [(dist.irecv if rank else dist.isend)(x, 1 - rank) for x in kept]
            for work in works:
                assert work is not None
                work.wait()
            del kept, works, work

    if on_a_thread:
        thread = threading.Thread(target=exchange)
        thread.start()
        thread.join()
    else:
        exchange()
    gc.collect()
    held = sum(isinstance(o, torch.Tensor) and o.numel() == size for o in gc.get_objects())
    return held, len(tap.state.under_way)


@pytest.mark.parametrize("on_a_thread", [False, True])
def test_messages_that_have_been_waited_for_are_forgotten(on_a_thread: bool) -> None:
    for held, under_way in run_ranks(2, _many_messages, on_a_thread):
        assert held <= (0 if on_a_thread else 64)
        assert under_way <= (0 if on_a_thread else 64)
