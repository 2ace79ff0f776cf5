"""On one GPU: moments of collectives against the profiler's kernels; memory; the gradient norm."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nbdist.shared.packed import CALL, TICK_NS

pytestmark = pytest.mark.gpu

STEPS = 10
# Bytes that a collective takes in: some milliseconds on any GPU, beside which 0.2 ms are few.
MOST_BYTES = 4 << 30


@pytest.fixture
def nccl(tmp_path: Path) -> Iterator[Any]:
    """One rank over NCCL in this process, with the tap."""
    import torch
    import torch.distributed as dist

    from nbdist.engine.tap import tap

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    torch.cuda.set_device(0)
    tap.install("full")
    yield tap
    tap.set_level("off")
    dist.destroy_process_group()


def _rows(calls: Any) -> list[tuple[str, float, float]]:
    """Return kind, begin and end in milliseconds of each row."""
    flat = calls.calls.tolist()
    rows = [flat[i : i + len(CALL)] for i in range(0, len(flat), len(CALL))]
    ms = TICK_NS / 1e6
    return [(calls.new[at].kind, begin * ms, end * ms) for at, _, _, begin, end, _ in rows]


def _tensors() -> tuple[Any, Any]:
    """Return what a reduce-scatter of one rank reads and writes: an eighth of what is free each."""
    import torch

    count = min(MOST_BYTES, torch.cuda.mem_get_info()[0] // 8) // 4
    return torch.ones(count, device="cuda"), torch.empty(count, device="cuda")


def by_call(kernels: list[tuple[float, float]], calls: int) -> list[tuple[float, float]]:
    """Return from when to when each of as many calls ran, of what ran on the GPU for all of them.

    The GPU was idle between two calls, and each took as many kernels and copies as the others.
    """
    each, rest = divmod(len(kernels), calls)
    assert each, "the profiler saw no kernel of a collective"
    assert not rest, f"{len(kernels)} kernels of {calls} calls that are alike"
    parts = [sorted(kernels)[i : i + each] for i in range(0, len(kernels), each)]
    return [(part[0][0], max(end for _, end in part)) for part in parts]


# Torch 2.11 says it of every profile, of one cycle too.
@pytest.mark.filterwarnings("ignore:.*Profiler clears events at the end of each cycle")
@pytest.mark.parametrize("is_async", [True, False])
def test_a_collectives_time_is_its_kernels(nccl: Any, is_async: bool) -> None:
    import torch
    import torch.distributed as dist
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    x, out = _tensors()
    for _ in range(3):
        dist.reduce_scatter_tensor(out, x)
    torch.cuda.synchronize()
    nccl.begin_cell()
    nccl.take()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(STEPS):
            work = dist.reduce_scatter_tensor(out, x, async_op=is_async)
            if is_async:
                work.wait()
            torch.cuda.synchronize()
        torch.cuda.synchronize()
    calls = nccl.take(1).calls
    assert calls is not None
    rows = _rows(calls)
    kernels = [  # of one rank NCCL copies; what queues it on the host is an event as well
        (event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
        if "nccl" in event.name.lower() or "memcpy" in event.name.lower()
    ]
    assert len(rows) == STEPS
    ran = by_call(kernels, STEPS)
    for (_, begin, end), (start_us, end_us) in zip(rows, ran, strict=True):
        lasts_ms = (end_us - start_us) / 1e3
        assert end - begin == pytest.approx(lasts_ms, rel=0.05, abs=0.2)
    # The distances between them are those of the kernels: one clock, followed.
    told = [begin - rows[0][1] for _, begin, _ in rows]
    seen = [(start_us - ran[0][0]) / 1e3 for start_us, _ in ran]
    assert told == pytest.approx(seen, abs=0.5)


def _gpu_ms(work: Callable[[], object], times: int) -> float:
    """Return how long the GPU takes for what `work` queues on the current stream, in the mean."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        work()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / times


def test_the_compute_streams_wait_is_what_computing_does_not_hide(nccl: Any) -> None:
    import torch
    import torch.distributed as dist

    x, out = _tensors()
    a = torch.randn(4096, 4096, device="cuda")

    def send() -> Any:
        return dist.reduce_scatter_tensor(out, x, async_op=True)

    for _ in range(3):
        send().wait()
        a @ a
    torch.cuda.synchronize()
    sent_ms = _gpu_ms(lambda: send().wait(), 5)
    computed_ms = _gpu_ms(lambda: a @ a, 20)
    # Long beside the 0.1 ms by which moments are wrong, and beside what queues it on the host. Both
    # at once share the GPU's memory, and other processes may have their turns.
    sends = math.ceil(20 / sent_ms)
    products = math.ceil(4 * sends * sent_ms / computed_ms)
    exposed_ms = []
    for many in (0, products):
        nccl.begin_cell()
        nccl.take()
        works = [send() for _ in range(sends)]
        for _ in range(many):
            a @ a
        works[-1].wait()
        torch.cuda.synchronize()
        calls = nccl.take(1).calls
        assert calls is not None
        flat = calls.waits.tolist()
        exposed_ms.append((sum(flat[1::2]) - sum(flat[::2])) * TICK_NS / 1e6)
    alone_ms, hidden_ms = exposed_ms
    assert alone_ms > 0.5 * sends * sent_ms
    assert hidden_ms < 0.2 * alone_ms


def test_memory_is_what_torch_says(nccl: Any) -> None:
    import torch

    from nbdist.engine.training.resources import Memory

    torch.cuda.reset_peak_memory_stats()
    held = torch.empty(1 << 26, dtype=torch.uint8, device="cuda")
    gone = torch.empty(1 << 27, dtype=torch.uint8, device="cuda")
    del gone
    values = Memory().take(1 << 62)
    assert values["cuda_bytes"] == torch.cuda.memory_allocated()
    assert values["cuda_reserved_bytes"] == torch.cuda.memory_reserved()
    assert values["cuda_peak_bytes"] == torch.cuda.max_memory_allocated()
    assert values["cuda_peak_bytes"] >= values["cuda_bytes"] + (1 << 27)
    assert values["cuda_bytes"] >= held.nbytes


# Torch says it of each use.
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_the_gradient_norm_is_clippings_and_is_found_without_waiting(nccl: Any) -> None:
    import torch

    from nbdist.engine.training.gradients import Shares

    model = torch.nn.Linear(64, 64, device="cuda")
    model(torch.randn(8, 64, device="cuda")).square().sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).item()
    torch.cuda.set_sync_debug_mode("error")
    try:
        share = Shares().of(optimizer)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert share is not None
    assert share.device.type == "cuda"
    assert share.sqrt().item() == pytest.approx(expected, rel=1e-4)


GLOO = """
import torch, torch.distributed as dist
x = torch.ones(1 << 20, device=device)
model = torch.nn.Linear(8, 1).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2000):  # a clock of the GPU that is busy with others is asked for each second
    loss = model(torch.ones(4, 8, device=device)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    optimizer.step()
    loss.item()
"""


@pytest.mark.parametrize(("n", "backend"), [(1, "nccl"), (2, "gloo")])
def test_collectives_of_tensors_on_the_gpu_are_told_and_met(
    n: int, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import nbdist

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    with nbdist.start(n=n, device="cuda", backend=backend) as session:
        session.run(GLOO, track=False)
        analysis = session._attempts._showing.insight.now()
    (row,) = [row for row in analysis.table if row.kind == "all_reduce"]
    assert row.count == pytest.approx(1, abs=0.1)  # a step
    assert row.bytes == 4 << 20
    for rank in analysis.ranks:
        assert sum(rank.parts.values()) == pytest.approx(rank.step_ms, rel=1e-3)
