"""What the hooks see of training loops that know nothing of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.group.harness import run_ranks


class Watch:
    """The hooks in place in this process, and the rows they record."""

    def __init__(self, level: str = "full") -> None:
        from nbdist.engine.kernel.records import Recorder
        from nbdist.engine.tap import tap
        from nbdist.engine.training import training

        self.published: list[dict[str, Any]] = []
        self.facts: dict[str, str] = {}
        self.recorder = Recorder(0, self.published.append)
        tap.install(level)
        training.here.install(self.recorder)
        training.here.begin_cell()

    def rows(self, kind: str = "step") -> list[dict[str, float]]:
        """Return the values of the cell's records, which ends here."""
        from nbdist.engine.training import training
        from nbdist.shared.wire import Batch

        training.here.end_cell()
        self.recorder.flush()
        batches = [Batch.from_wire(content) for content in self.published]
        for batch in batches:
            self.facts.update(batch.facts)
        records = [record for batch in batches for record in batch.records]
        return [{"step": r.step, **r.values} for r in records if r.kind == kind]


def _model(width: int = 8) -> Any:
    import torch
    from torch import nn

    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 1))


def _dataset(size: int = 24) -> Any:
    import torch
    from torch.utils.data import TensorDataset

    generator = torch.Generator().manual_seed(2)
    x = torch.randn(size, 4, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True))


def _plain() -> Any:
    import torch
    from torch.nn.functional import mse_loss
    from torch.utils.data import DataLoader

    watch = Watch()
    model, losses = _model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for x, y in DataLoader(_dataset(), batch_size=8):
        loss = mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, watch.rows()


def test_a_plain_loop_gives_a_record_a_step_with_its_loss_and_times() -> None:
    ((losses, rows),) = run_ranks(1, _plain)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [row["loss"] for row in rows] == losses
    for row in rows:
        assert row["samples"] == 8
        assert row["total"] == 3
        parts = ("compute_s", "comm_s", "data_s", "optimizer_s", "other_s")
        assert row["step_s"] == pytest.approx(sum(row[part] for part in parts), abs=1e-12)
        assert row["compute_s"] == pytest.approx(row["forward_s"] + row["backward_s"], abs=1e-12)
        assert (row["bytes"], row["collectives"], row["comm_total_s"]) == (0, 0, 0)


def _no_optimizer() -> Any:
    from torch.utils.data import DataLoader

    watch = Watch()
    model = _model()
    for x, _ in DataLoader(_dataset(), batch_size=8):
        model(x).mean().backward()
    return watch.rows()


def test_a_loop_without_an_optimizer_gives_nothing() -> None:
    assert run_ranks(1, _no_optimizer) == [[]]


def _accumulate() -> Any:
    import torch
    from torch.utils.data import DataLoader

    watch = Watch()
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for i, (x, _) in enumerate(DataLoader(_dataset(), batch_size=2)):
        loss = model(x).square().mean()
        losses.append(loss.item())
        loss.backward()
        if i % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
    return losses, watch.rows()


def test_accumulated_gradients_make_one_step_with_the_mean_loss() -> None:
    ((losses, rows),) = run_ranks(1, _accumulate)
    assert [row["loss"] for row in rows] == [
        pytest.approx(sum(losses[i : i + 4]) / 4) for i in (0, 4, 8)
    ]
    assert [row["samples"] for row in rows] == [8, 8, 8]
    assert [row["total"] for row in rows] == [3, 3, 3]


def _several_optimizers() -> Any:
    import torch
    from torch.distributed.optim import ZeroRedundancyOptimizer

    from nbdist.engine.compat import torch_live

    torch_live.here.watch()  # as a rank does when it joins
    counted = {}
    watch = Watch()

    def loop(name: str, body: Callable[[], None]) -> None:
        from nbdist.engine.training import training

        training.here.begin_cell()
        for _ in range(6):
            body()
        counted[name] = training.here.end_cell()

    a, b = _model(), _model()
    x = torch.ones(2, 4)
    first = torch.optim.SGD(a.parameters(), lr=0.01)
    second = torch.optim.Adam(b.parameters(), lr=0.01)

    def gan() -> None:
        a(x).mean().backward()
        first.step()
        b(x).mean().backward()
        second.step()

    loop("two in turn", gan)
    calls = iter(range(100))

    def warm_up() -> None:
        a(x).mean().backward()
        (first if next(calls) == 0 else second).step()

    loop("one for a warm-up", warm_up)
    trained: list[torch.optim.Optimizer] = []

    def one_after_another() -> None:
        if len(trained) % 2 == 0:  # every other step is a training of its own
            trained.append(torch.optim.SGD(a.parameters(), lr=0.01))
        else:
            trained.append(trained[-1])
        a(x).mean().backward()
        trained[-1].step()

    loop("one training after another", one_after_another)
    zero = ZeroRedundancyOptimizer(a.parameters(), torch.optim.SGD, lr=0.01)

    def sharded() -> None:
        a(x).mean().backward()
        zero.step()

    loop("one inside another", sharded)
    lbfgs = torch.optim.LBFGS(a.parameters(), max_iter=3)

    def closure() -> Any:
        lbfgs.zero_grad()
        loss = a(x).square().mean()
        loss.backward()
        return loss

    loop("closure", lambda: lbfgs.step(closure))
    each = [torch.optim.SGD([p], lr=0.01) for p in b.parameters()]
    for parameter, optimizer in zip(b.parameters(), each, strict=True):
        parameter.register_post_accumulate_grad_hook(lambda _, o=optimizer: o.step())
    loop("one a parameter, in backward", lambda: b(x).mean().backward())
    return counted, watch.facts


def test_several_optimizers_do_not_count_a_step_twice() -> None:
    ((counted, facts),) = run_ranks(1, _several_optimizers)
    assert counted.pop("one for a warm-up") == 5  # the second one's first step is still the first's
    assert set(counted.values()) == {6}, counted
    assert facts == {}


def _dcgan(batches: int, judge_steps: int = 1, left_out: int = 0) -> Any:
    """Return the losses of each iteration of DCGAN's loop, and what was recorded of it.

    `left_out` is the iteration in which the last optimizer does not step.
    """
    import torch
    from torch.nn.functional import binary_cross_entropy_with_logits as bce
    from torch.utils.data import DataLoader

    from nbdist.engine.compat import torch_live

    torch_live.here.watch()  # as a rank does when it joins
    watch = Watch()
    made, judging = _model(), _model()
    made.append(torch.nn.Linear(1, 4))
    judge_optimizer = torch.optim.Adam(judging.parameters(), lr=0.01)
    optimizer = torch.optim.Adam(made.parameters(), lr=0.01)
    every = []
    for x, _ in DataLoader(_dataset(4 * batches), batch_size=4):
        real, fake = torch.ones(4, 1), made(torch.ones(4, 4))
        losses: list[float] = []

        def backward(loss: Any, losses: list[float] = losses) -> None:
            losses.append(loss.item())
            loss.backward()

        for _ in range(judge_steps):
            judging.zero_grad()
            backward(bce(judging(x), real))
            backward(bce(judging(fake.detach()), 1 - real))
            judge_optimizer.step()
        made.zero_grad()
        backward(bce(judging(fake), real))
        every.append(losses)
        if len(every) != left_out:
            optimizer.step()
    return every, watch.rows()


def _means(every: list[list[float]]) -> Any:
    return pytest.approx([sum(losses) / len(losses) for losses in every], rel=1e-12)


@pytest.mark.parametrize("batches", [1, 2, 12])
def test_the_loss_of_each_step_of_a_gan_is_the_mean_of_its_own_iteration(batches: int) -> None:
    ((every, rows),) = run_ranks(1, _dcgan, batches)
    assert [row["loss"] for row in rows] == _means(every)
    assert [row["step"] for row in rows] == list(range(1, batches + 1))
    assert [row["samples"] for row in rows] == [4] * batches


def test_a_step_that_a_scaler_leaves_out_is_one_with_the_next_and_no_loss_moves() -> None:
    ((every, rows),) = run_ranks(1, _dcgan, 12, 1, 6)
    assert [row["loss"] for row in rows] == _means([*every[:5], every[5] + every[6], *every[7:]])


def test_each_step_of_a_network_that_steps_more_often_is_a_step() -> None:
    ((_, rows),) = run_ranks(1, _dcgan, 4, 3)
    assert [row["step"] for row in rows] == list(range(1, 13))


def _folds() -> Any:
    """Return the numbers of the trainings that began, by step; two steps each."""
    import torch

    from nbdist.engine.compat import torch_live

    torch_live.here.watch()
    watch = Watch()

    def fit(*models: Any) -> None:
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
        for _ in range(2):
            for model, optimizer in zip(models, optimizers, strict=True):
                model(torch.ones(2, 4)).mean().backward()
                optimizer.step()

    model = _model()
    fit(model)
    fit(model)  # with another optimizer, as after a warm-up
    fit(_model())
    fit(_model())  # may lie where the one before lay
    fit(made := _model(), judging := _model())
    fit(judging, made)
    return {row["step"]: row.get("training_began") for row in watch.rows()}


def test_another_training_begins_with_a_new_optimizer_of_a_model_that_was_not_trained() -> None:
    (began,) = run_ranks(1, _folds)
    assert len(began) == 12
    assert {step: n for step, n in began.items() if n} == {5: 2, 7: 3, 9: 4}


def _scaled() -> Any:
    import torch

    watch = Watch()
    model, losses = _model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in range(3):
        loss = model(torch.ones(2, 4)).square().mean()
        losses.append(loss.item())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return losses, watch.rows()


def test_the_loss_is_the_one_before_a_grad_scaler() -> None:
    ((losses, rows),) = run_ranks(1, _scaled)
    assert [row["loss"] for row in rows] == losses


class _Slow:
    """A dataset that takes `delay_s` a sample."""

    def __init__(self, delay_s: float) -> None:
        self.delay_s = delay_s

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        import torch

        time.sleep(self.delay_s)
        return {"x": torch.ones(4), "name": str(index)}


def _slow_data(workers: int) -> Any:
    import torch
    from torch.utils.data import DataLoader

    from tests.group.loader_ranks import allow_workers

    allow_workers()
    watch = Watch()
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train: DataLoader[Any] = DataLoader(_Slow(0.02), batch_size=2, num_workers=workers)  # type: ignore[arg-type]
    check = DataLoader(_dataset(), batch_size=3)
    for batch in train:
        model(batch["x"]).mean().backward()
        optimizer.step()
        for x, _ in check:
            model(x)
    return watch.rows()


@pytest.mark.parametrize("workers", [0, 1])
def test_waiting_for_a_batch_is_data_time_and_validation_is_no_sample(workers: int) -> None:
    (rows,) = run_ranks(1, _slow_data, workers)
    assert [row["samples"] for row in rows] == [2, 2, 2, 2]
    assert [row["total"] for row in rows] == [4, 4, 4, 4]
    assert rows[0]["data_s"] >= 0.04
    if workers == 0:
        assert all(row["data_s"] >= 0.04 for row in rows)


def _broken_hook() -> Any:
    import torch

    from nbdist.engine.training import steps

    watch = Watch()
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def fail(self: steps.StepRule, optimizer: int, *, is_new: bool = False) -> bool:
        raise RuntimeError("broken on purpose")

    native, steps.StepRule.closes = steps.StepRule.closes, fail  # type: ignore[method-assign]
    for _ in range(3):
        model(torch.ones(2, 4)).mean().backward()
        optimizer.step()
    from nbdist.engine.component import EndedCell
    from nbdist.engine.training import training
    from nbdist.shared.wire import CellStart

    training.log(x=1)
    rows, part = watch.rows(), training.here
    ended = EndedCell(1, "", has_succeeded=True)
    said = list(part.cell_ended(ended))
    steps.StepRule.closes = native  # type: ignore[method-assign]
    part.cell_began(CellStart(2, (0,), 2))
    model(torch.ones(2, 4)).mean().backward()
    optimizer.step()
    said += part.cell_ended(ended)
    return rows, watch.rows("log"), watch.facts, said, len(watch.rows())


def test_a_hook_that_fails_is_switched_off_until_the_cell_ends_which_says_so() -> None:
    ((rows, logged, facts, said, next_rows),) = run_ranks(1, _broken_hook)
    (sentence,) = said
    assert "incomplete: a hook failed (step: RuntimeError: broken on purpose)" in sentence
    assert next_rows == 1
    assert rows == []
    assert len(logged) == 1
    assert facts == {"hook_step": "switched off: RuntimeError: broken on purpose"}


def _switched_off() -> Any:
    import torch
    import torch.distributed as dist
    from torch.optim.optimizer import _global_optimizer_post_hooks
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    def places() -> list[Any]:
        return [
            torch.autograd.backward,
            _BaseDataLoaderIter.__next__,
            torch.amp.GradScaler.scale,
            dist.Work.wait,
            len(_global_optimizer_post_hooks),
        ]

    before = places()
    from nbdist.engine.tap import tap
    from nbdist.engine.training import training

    Watch()
    during = places()
    training.here.set_enabled(False)
    tap.set_level("off")
    return [a is b or a == b for a, b in zip(before, places(), strict=True)], [
        a == b for a, b in zip(before, during, strict=True)
    ]


def test_switched_off_nothing_is_left_in_torch() -> None:
    assert run_ranks(1, _switched_off) == [([True] * 5, [False] * 5)]


def _log() -> Any:
    import numpy as np
    import torch

    import nbdist

    watch = Watch()
    refused = []
    for value in ("0.5", [1.0], torch.ones(2), None, np.ones(3), 10**400):
        try:
            nbdist.log(fine=1.0, bad=value)
        except nbdist.UsageError as error:
            refused.append(str(error))
    nbdist.log(
        a=1, b=np.float32(0.5), c=torch.tensor(2.0, requires_grad=True), d=np.int64(3), e=True
    )
    return refused, watch.rows("log")


def test_log_takes_numbers_of_all_kinds_and_refuses_the_rest_whole() -> None:
    ((refused, rows),) = run_ranks(1, _log)
    assert len(refused) == 6
    assert refused[0] == "nbdist.log takes numbers, and bad is a str."
    assert refused[2] == "nbdist.log takes numbers, and bad is a Tensor of (2,)."
    assert rows == [{"step": 0, "a": 1, "b": 0.5, "c": 2, "d": 3, "e": 1}]


def wrapped(kind: str) -> Any:
    """Return a model spread over the ranks, and the parameters to optimise."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )
    from torch.nn.parallel import DistributedDataParallel

    model = _model(64)
    if kind == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if kind == "fsdp":
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def _train(kind: str, level: str, steps: int = 5) -> Any:
    import torch
    import torch.distributed as dist
    from torch.nn.functional import mse_loss

    watch = Watch(level)
    model = wrapped(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(dist.get_rank() if kind != "tp" else 0)
    losses = []
    for _ in range(steps):
        x = torch.randn(16, 4, generator=generator)
        loss = mse_loss(model(x), x.sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    parameters = [
        (p.full_tensor() if hasattr(p, "full_tensor") else p).tolist() for p in model.parameters()
    ]
    return losses, parameters, watch.rows()


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "tp"])
def test_training_is_bit_equal_with_and_without_the_tap(kind: str) -> None:
    bare = run_ranks(2, _train, kind, "off")
    full = run_ranks(2, _train, kind, "full")
    for (losses, parameters, rows), (seen_losses, seen_parameters, seen_rows) in zip(
        bare, full, strict=True
    ):
        assert seen_losses == losses
        assert seen_parameters == parameters
        assert [row["loss"] for row in seen_rows] == losses
        assert all("comm_s" not in row for row in rows)
        assert "comm_s" not in seen_rows[0]  # nobody saw where the first step began
        for row in seen_rows[1:]:
            assert row["collectives"] > 0
            assert row["bytes"] > 0
            assert row["comm_total_s"] > 0
            assert 0 < row["comm_s"] < row["step_s"]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_where_collectives_are_only_counted_no_step_claims_to_know_its_communication(
    kind: str,
) -> None:
    for _, _, rows in run_ranks(2, _train, kind, "counts"):
        for row in rows[1:]:
            assert row["collectives"] > 0
            assert "comm_s" not in row
            own = [row[f"{part}_s"] for part in ("compute", "data", "optimizer", "other")]
            assert sum(own) <= row["step_s"] + 1e-9
            assert row["compute_s"] > 0
