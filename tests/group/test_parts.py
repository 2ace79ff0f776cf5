"""Time planted in loops of all kinds is found in the part where it lies; steps are exact.

Real loops and real hooks run on a clock that only naps move, so that each part must be what was
planted, to the nanosecond. One loop sleeps by the real clock.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from importlib.util import find_spec
from statistics import median
from typing import Any

import pytest

from tests.group.harness import run_ranks
from tests.group.test_training import Watch

STEPS = 7
PARTS = ("data", "forward", "backward", "optimizer", "other")
REAL = 3  # real naps are longer: what the loop itself does between them is counted as well
NAP_S = {"data": 0.021, "forward": 0.024, "backward": 0.027, "optimizer": 0.03, "other": 0.022}

Row = dict[str, float]
Planted = list[dict[str, float]]  # a step: seconds slept in each part


class Naps:
    """Sleeps of one loop, by the step they belong to."""

    def __init__(self, *, are_real: bool) -> None:
        self.steps: Planted = [defaultdict(float)]
        self.now_ns = 0
        self._are_real = are_real

    def take(self, part: str) -> None:
        """Sleep, and note how long."""
        if self._are_real:
            began = time.perf_counter()
            time.sleep(REAL * NAP_S[part])
            self.steps[-1][part] += time.perf_counter() - began
        else:
            self.now_ns += round(NAP_S[part] * 1e9)
            self.steps[-1][part] += NAP_S[part]

    def next_step(self) -> None:
        """What is slept from now on belongs to the next step."""
        self.steps.append(defaultdict(float))


def _world(naps: Naps) -> Any:
    """Return a model, a dataset and an optimizer class that nap where their name says."""
    import torch
    from torch import nn

    class Back(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            naps.take("backward")
            return gradients[0]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.training:
                naps.take("other")
                return self.layer(x)
            naps.take("forward")
            return Back.apply(self.layer(x))

    class Data:
        def __init__(self, part: str = "data") -> None:
            self.part = part

        def __len__(self) -> int:
            return STEPS

        def __getitem__(self, index: int) -> torch.Tensor:
            if index >= STEPS:
                raise IndexError(index)
            naps.take(self.part)
            return torch.ones(4)

    class Slow(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            loss = super().step(closure)
            naps.take("optimizer")
            naps.next_step()  # the step ends with this one's end
            return loss

    torch.manual_seed(1)
    return Net(), Data, Slow


def _loader(data: Any, size: int = 1) -> Any:
    from torch.utils.data import DataLoader

    return DataLoader(data, batch_size=size)


def _plain(naps: Naps) -> None:
    net, data, slow = _world(naps)
    optimizer = slow(net.parameters(), lr=0.01)
    for x in _loader(data()):
        loss = net(x).mean()
        optimizer.zero_grad()
        loss.backward()
        naps.take("other")
        optimizer.step()
        naps.take("other")


def _tensors(naps: Naps) -> None:
    net, _, slow = _world(naps)
    optimizer = slow(net.parameters(), lr=0.01)
    import torch

    x = torch.ones(1, 4)
    for _ in range(STEPS):
        net(x).mean().backward()
        optimizer.step()


def _accumulated(naps: Naps) -> None:
    net, data, slow = _world(naps)
    optimizer = slow(net.parameters(), lr=0.01)
    for _ in range(2):
        for i, x in enumerate(_loader(data())):
            net(x).mean().backward()
            naps.take("other")
            if i % 2:
                optimizer.step()
                optimizer.zero_grad()


def _evaluated(naps: Naps) -> None:
    import torch

    net, data, slow = _world(naps)
    optimizer = slow(net.parameters(), lr=0.01)
    check = _loader(data("other"), 3)
    for x in _loader(data()):
        net(x).mean().backward()
        optimizer.step()
        net.eval()
        with torch.no_grad():
            for i, y in enumerate(check):
                net(y)
                if i:  # limit_val_batches: broken off
                    break
        net.train()


def _adversarial(naps: Naps) -> None:
    import torch

    net, data, slow = _world(naps)
    other, *_ = _world(naps)
    first = torch.optim.SGD(net.parameters(), lr=0.01)
    second = slow(other.parameters(), lr=0.01)
    for x in _loader(data()):
        net(x).mean().backward()
        other(x).mean().backward()
        second.step()
        first.step()


def _scaled(naps: Naps) -> None:
    import torch

    net, data, slow = _world(naps)
    optimizer = slow(net.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for x in _loader(data()):
        scaler.scale(net(x).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def _closure(naps: Naps) -> None:
    import torch

    net, data, slow = _world(naps)
    optimizer = slow(net.parameters(), lr=0.01)
    for x in _loader(data()):

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss = net(x).mean()
            loss.backward()
            naps.take("other")
            return loss

        optimizer.step(closure)


def _lbfgs(naps: Naps) -> None:
    import torch

    net, data, _ = _world(naps)

    class Slow(torch.optim.LBFGS):
        def step(self, closure: Any = None) -> Any:
            loss = super().step(closure)
            naps.take("optimizer")
            naps.next_step()
            return loss

    optimizer = Slow(net.parameters(), lr=0.01, max_iter=3)
    for x in _loader(data()):

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)


def _accelerate(naps: Naps) -> None:
    from accelerate import Accelerator

    net, data, slow = _world(naps)
    accelerator = Accelerator(cpu=True)
    net, optimizer, loader = accelerator.prepare(
        net, slow(net.parameters(), lr=0.01), _loader(data())
    )
    for x in loader:
        accelerator.backward(net(x).mean())
        optimizer.step()
        naps.take("other")
        optimizer.zero_grad()


def _lightning(naps: Naps) -> None:
    import lightning

    net, data, slow = _world(naps)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, index: int) -> Any:
            return self.net(batch).mean()

        def on_train_batch_end(self, *_: Any) -> None:
            naps.take("other")

        def validation_step(self, batch: Any, index: int) -> None:
            self.net(batch)

        def configure_optimizers(self) -> Any:
            return slow(self.parameters(), lr=0.01)

    lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        val_check_interval=3,
        limit_val_batches=1,
    ).fit(Module(), _loader(data()), _loader(data("other")))


def _transformers(naps: Naps) -> None:
    import tempfile

    from torch import nn
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Callback(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            naps.take("other")

    net, data, slow = _world(naps)

    class Rows(data):  # type: ignore[misc, valid-type]
        def __getitem__(self, index: int) -> Any:
            return {"x": super().__getitem__(index)}

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Any) -> Any:
            return {"loss": self.net(x).mean()}

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=1,
            per_device_train_batch_size=1,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        model = Model()
        optimizers = (slow(model.parameters(), lr=0.01), None)
        Trainer(
            model,
            arguments,
            train_dataset=Rows(),
            optimizers=optimizers,
            callbacks=[Callback()],
        ).train()


def _watched(loop: Callable[[Naps], None]) -> Any:
    """Return what was planted in a loop, and the rows, by the clock of naps."""
    from nbdist.engine.training import cell

    naps, watch = Naps(are_real=False), Watch("off")
    cell.perf_counter_ns = lambda: naps.now_ns  # type: ignore[attr-defined]
    loop(naps)
    rows = watch.rows()
    assert watch.facts == {}, watch.facts
    return naps.steps, rows


def _check(planted: Planted, rows: list[Row]) -> None:
    for row, naps in list(zip(rows, planted, strict=False))[1:]:  # the first may have no times
        own = [row[f"{part}_s"] for part in ("compute", "data", "optimizer", "other")]
        assert sum(own) == pytest.approx(row["step_s"], abs=1e-12)
        assert {part: row[f"{part}_s"] for part in PARTS} == pytest.approx(
            {part: naps[part] for part in PARTS}, abs=1e-12
        )


LOOPS = {
    loop.__name__.strip("_"): (loop, steps)
    for loop, steps in (
        (_plain, STEPS),
        (_tensors, STEPS),
        (_accumulated, 6),
        (_evaluated, STEPS),
        (_adversarial, STEPS),
        (_scaled, STEPS),
        (_closure, STEPS),
        (_lbfgs, STEPS),
    )
}


def _all_loops() -> Any:
    return {name: _watched(loop) for name, (loop, _) in LOOPS.items()}


@pytest.fixture(scope="module")
def found() -> Any:
    (found,) = run_ranks(1, _all_loops, timeout_s=110)
    return found


@pytest.mark.parametrize("name", LOOPS)
def test_what_is_planted_in_a_loop_is_found_in_its_part(found: Any, name: str) -> None:
    planted, rows = found[name]
    assert [row["step"] for row in rows] == list(range(1, LOOPS[name][1] + 1))
    assert all("loss" in row for row in rows)
    _check(planted, rows)


FRAMEWORKS = {loop.__name__.strip("_"): loop for loop in (_accelerate, _lightning, _transformers)}


def _loops_of(frameworks: list[str]) -> Any:
    return {name: _watched(FRAMEWORKS[name]) for name in frameworks}


@pytest.fixture(scope="module")
def found_in_frameworks() -> Any:
    # Together, for they import each other.
    (found,) = run_ranks(1, _loops_of, list(filter(find_spec, FRAMEWORKS)), timeout_s=110)
    return found


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_what_is_planted_in_a_loop_of_a_framework_is_found_in_its_part(
    found_in_frameworks: Any, name: str
) -> None:
    if name not in found_in_frameworks:
        pytest.skip(f"{name} is not installed")
    planted, rows = found_in_frameworks[name]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert {row["samples"] for row in rows} == {1}
    assert rows[-1]["total"] == STEPS
    assert all("loss" in row for row in rows)
    _check(planted, rows)


def _asleep() -> Any:
    naps, watch = Naps(are_real=True), Watch("full")
    _plain(naps)
    return naps.steps, watch.rows()


def test_what_sleeps_by_the_real_clock_is_found_within_five_percent() -> None:
    ((planted, rows),) = run_ranks(1, _asleep)
    for part in PARTS:
        off = median(
            row[f"{part}_s"] - naps[part] for row, naps in zip(rows, planted, strict=False)
        )
        assert abs(off) <= 0.05 * REAL * NAP_S[part], (part, off)
