"""What is explained of real ranks against delays that were put into them."""

from __future__ import annotations

import base64
import json
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from nbdist.client.metrics.analysis.analyst import Analyst
from nbdist.client.metrics.analysis.clocks import Clocks
from nbdist.client.metrics.analysis.values import Analysis, ExplainedStep
from nbdist.shared.packed import TICK_NS
from nbdist.shared.wire import Record
from tests.group.harness import run_ranks
from tests.unit.client.metrics.analysis.analysis_data import OneClock

STEPS = 25
DELAY_S = 0.04

Told = tuple[list[Record], list[int]]


def _train(kind: str, late: int) -> Told:
    """Take steps, one rank late in each; return its records, and the moments it came at."""
    import torch
    import torch.distributed as dist

    from nbdist.engine.kernel.records import Recorder
    from nbdist.engine.tap import tap
    from nbdist.engine.training import training
    from nbdist.shared.wire import Batch
    from tests.group.truth import tell_every_step

    records: list[Record] = []
    recorder = Recorder(dist.get_rank(), lambda c: records.extend(Batch.from_wire(c).records))
    torch.manual_seed(0)
    torch.set_num_threads(1)
    step = KINDS[kind]()
    tap.install("full")
    training.here.install(recorder)
    training.here.begin_cell()
    tap.begin_cell()
    tell_every_step()
    came = []

    def arrive() -> None:
        if dist.get_rank() == late:
            time.sleep(DELAY_S)
        came.append(time.perf_counter_ns())

    for _ in range(STEPS):
        step(arrive)
    training.here.end_cell()
    recorder.flush()
    return records, came


def _ddp() -> Callable[..., None]:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(torch.nn.Linear(256, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(arrive: Callable[[], None]) -> None:
        loss = model(torch.ones(4, 256)).square().mean()
        arrive()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _fsdp() -> Callable[..., None]:
    import torch
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 256))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(arrive: Callable[[], None]) -> None:
        arrive()
        model(torch.ones(4, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _tensor_parallel() -> Callable[..., None]:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import parallel

    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Linear(96, 64))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    plan = {"0": parallel.ColwiseParallel(), "1": parallel.RowwiseParallel()}
    parallel.parallelize_module(model, mesh, plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(arrive: Callable[[], None]) -> None:
        x = torch.ones(4, 64)
        arrive()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _own(communicate: Callable[[], None]) -> Callable[..., None]:
    """Return a step with one communication and an optimizer that needs none."""
    import torch

    weight = torch.nn.Parameter(torch.ones(8))
    optimizer = torch.optim.SGD([weight], lr=0.01)

    def step(arrive: Callable[[], None]) -> None:
        arrive()
        communicate()
        weight.sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _collective() -> Callable[..., None]:
    import torch
    import torch.distributed as dist

    values = torch.ones(100_000)
    return _own(lambda: dist.all_reduce(values))


def _sub_group_barrier() -> Callable[..., None]:
    import torch.distributed as dist

    half = dist.get_world_size() // 2
    groups = [dist.new_group(range(half)), dist.new_group(range(half, 2 * half))]
    mine = groups[dist.get_rank() // half]
    return _own(lambda: dist.barrier(mine))


def _pipeline() -> Callable[..., None]:
    """Rank 0 sends to 1, which answers."""
    import torch
    import torch.distributed as dist

    values = torch.ones(100_000)

    def communicate() -> None:
        if dist.get_rank() == 0:
            dist.send(values, 1)
            dist.recv(values, 1)
        else:
            dist.recv(values, 0)
            dist.send(values, 0)

    return _own(communicate)


KINDS: dict[str, Callable[[], Callable[..., None]]] = {
    "ddp": _ddp,
    "fsdp": _fsdp,
    "tensor parallel": _tensor_parallel,
    "a collective": _collective,
    "a barrier of a sub-group": _sub_group_barrier,
    "a pipeline": _pipeline,
}


def explained(told: list[Told], clock: Any = None) -> tuple[list[ExplainedStep], Analysis]:
    analyst = Analyst(range(len(told)), clock or OneClock())
    records = [record for records, _ in told for record in records]
    return analyst.take(records, is_last=True), analyst.analysis()


def assert_late_by(told: list[Told], late: int, peers: list[int]) -> None:
    """The delay is found, in its size, on the right rank, and the peers waited for it."""
    steps, analysis = explained(told)
    assert len(steps) >= STEPS - 3
    came = [[told[rank][1][step.step - 1] for rank in (late, *peers)] for step in steps]
    injected = [(max(moments) - min(moments)) / 1e6 for moments in came]
    injected_ms = median(injected)
    assert injected_ms > 0.9e3 * DELAY_S
    errors_ms = [abs((s.skew_ms or 0.0) - ms) for s, ms in zip(steps, injected, strict=True)]
    assert median(errors_ms) <= max(0.05 * injected_ms, 1.0)
    assert sum(step.last == late for step in steps) >= 0.9 * len(steps)
    ranks = {rank.rank: rank for rank in analysis.ranks}
    for rank in ranks.values():
        assert sum(rank.parts.values()) == pytest.approx(rank.step_ms)
    for peer in peers:
        waits = ranks[peer].waits_for
        assert waits is not None
        assert waits[0] == late
        # Where a step has more collectives, ranks also wait in those, for whoever is late there.
        before_ms = median(
            (told[late][1][s.step - 1] - told[peer][1][s.step - 1]) / 1e6 for s in steps
        )
        waited_ms = median(step.waiting_ms[peer] for step in steps)
        # It came first, and computed before it waited: long where it has to share its core.
        computed_ms = ranks[peer].parts["compute"]
        assert waited_ms >= 0.95 * before_ms - computed_ms - 1.0
        assert median(step.waiting_ms[late] for step in steps) < 0.5 * waited_ms


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "tensor parallel", "a collective"])
def test_a_delay_before_what_all_ranks_do_is_found_with_its_size_and_its_rank(kind: str) -> None:
    assert_late_by(run_ranks(3, _train, kind, 1), late=1, peers=[0, 2])


def test_a_delay_before_the_barrier_of_a_sub_group_is_felt_in_that_group_alone() -> None:
    told = run_ranks(4, _train, "a barrier of a sub-group", 3)
    assert_late_by(told, late=3, peers=[2])
    steps, _ = explained(told)
    for rank in (0, 1):
        waited_ms = median(step.waiting_ms[2] for step in steps)
        assert median(step.waiting_ms[rank] for step in steps) < 0.1 * waited_ms


def test_a_delay_in_one_stage_of_a_pipeline_is_found_by_its_messages() -> None:
    told = run_ranks(2, _train, "a pipeline", 0)
    assert_late_by(told, late=0, peers=[1])
    _, analysis = explained(told)
    assert {(row.kind, row.ranks) for row in analysis.table} == {("send", (0, 1)), ("send", (1, 0))}


class Namespaced:
    """A rank behind a pipe, whose clock is `ahead_s` ahead."""

    def __init__(self, rank: int, store: str, ahead_s: int) -> None:
        shift = ["unshare", "--time", "--monotonic", str(ahead_s), "--fork"] if ahead_s else []
        command = [*shift, sys.executable, "-m", "tests.group.namespace_rank", str(rank), store]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def say(self, word: str) -> None:
        assert self.process.stdin is not None
        print(word, file=self.process.stdin, flush=True)

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def close(self) -> None:
        self.process.communicate(timeout=30)


def test_the_skew_between_clocks_that_differ_is_right_within_the_bound_that_is_told(
    tmp_path: Path,
) -> None:
    probe = subprocess.run(
        ["unshare", "--time", "--monotonic", "7", "--fork", "true"], capture_output=True, text=True
    )
    if probe.returncode:
        pytest.skip(f"NOT PERMITTED HERE: a time namespace ({probe.stderr.strip()})")
    ahead_s = 1000
    ranks = [Namespaced(rank, str(tmp_path / "store"), ahead_s * rank) for rank in (0, 1)]

    def ask(rank: int) -> Future[dict[str, Any]]:
        ranks[rank].say("clock")
        answer: Future[dict[str, Any]] = Future()
        answer.set_result(json.loads(ranks[rank].hear()))
        return answer

    try:
        clocks = Clocks(ask)
        clocks.refresh([0, 1])
        clocks.refresh([0, 1])
        for rank in ranks:
            rank.say("train")
        told: list[Told] = [pickle.loads(base64.b64decode(rank.hear())) for rank in ranks]
        clocks.refresh([0, 1])
    finally:
        for rank in ranks:
            rank.close()
    assert clocks.error_ns > 0
    steps, analysis = explained(told, clocks)
    bound_ms = analysis.clock_error_ms
    steps = [step for step in steps if step.skew_ms is not None]
    assert bound_ms < 0.5 * median(step.skew_ms or 0.0 for step in steps)
    assert len(steps) >= STEPS - 3
    for step in steps:
        # Both moments on the first rank's clock: we know what the namespace adds.
        came = [told[rank][1][step.step - 1] / 1e6 - rank * ahead_s * 1e3 for rank in (0, 1)]
        assert step.skew_ms is not None
        if came[1] - came[0] > bound_ms:
            assert step.last == 1
        slack_ms = bound_ms + longest_gap_ms(told, step)
        assert abs(step.skew_ms - abs(came[1] - came[0])) <= slack_ms


def longest_gap_ms(told: list[Told], step: ExplainedStep) -> float:
    """Return how long, at most, ranks took from the moment they noted to their launch."""
    gaps = []
    for records, moments in told:
        (calls,) = [r.detail for r in records if r.kind == "calls" and r.step == step.step]
        assert calls is not None
        launch_ns = calls.base_ns + calls.calls[2] * TICK_NS
        gaps.append((launch_ns - moments[step.step - 1]) / 1e6)
    return max(gaps) + TICK_NS / 1e6
