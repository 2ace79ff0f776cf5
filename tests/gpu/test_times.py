"""On one GPU: moments of collectives against torch.profiler's kernels; memory; the gradient norm.

Not run yet: no GPU was at hand when this was written.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu

STEPS = 10


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
    from nbdist.packed import CALL, TICK_NS

    flat = calls.calls.tolist()
    rows = [flat[i : i + len(CALL)] for i in range(0, len(flat), len(CALL))]
    ms = TICK_NS / 1e6
    return [(calls.new[at].kind, begin * ms, end * ms) for at, _, _, begin, end in rows]


@pytest.mark.parametrize("is_async", [True, False])
def test_a_collectives_time_is_its_kernels(nccl: Any, is_async: bool) -> None:
    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile

    x = torch.ones(1 << 26, device="cuda")
    out = torch.empty_like(x)
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
    kernels = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if "nccl" in event.name.lower() or "memcpy" in event.name.lower()
    )
    assert len(rows) == STEPS
    assert len(kernels) == STEPS  # of one rank NCCL copies
    for (_, begin, end), (start_us, end_us) in zip(rows, kernels, strict=True):
        lasts_ms = (end_us - start_us) / 1e3
        assert end - begin == pytest.approx(lasts_ms, rel=0.05, abs=0.2)
    # The distances between them are those of the kernels: one clock, followed.
    told = [begin - rows[0][1] for _, begin, _ in rows]
    seen = [(start_us - kernels[0][0]) / 1e3 for start_us, _ in kernels]
    assert told == pytest.approx(seen, abs=0.5)


def test_the_compute_streams_wait_is_what_computing_does_not_hide(nccl: Any) -> None:
    import torch
    import torch.distributed as dist

    x, out = torch.ones(1 << 28, device="cuda"), torch.empty(1 << 28, device="cuda")
    a = torch.randn(8192, 8192, device="cuda")
    for _ in range(3):
        dist.reduce_scatter_tensor(out, x, async_op=True).wait()
        a @ a
    torch.cuda.synchronize()
    exposed = []
    for products in (0, 20):
        nccl.begin_cell()
        nccl.take()
        work = dist.reduce_scatter_tensor(out, x, async_op=True)
        for _ in range(products):
            a @ a
        work.wait()
        torch.cuda.synchronize()
        calls = nccl.take(1).calls
        assert calls is not None
        flat = calls.waits.tolist()
        exposed.append(sum(flat[1::2]) - sum(flat[::2]))
    assert exposed[1] < 0.2 * exposed[0]


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
for step in range(20):
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
