"""Libraries run unmodified in a cell, truly distributed, again and again in the same engines.

Each cell is what the library's documents show, with a model and data small enough for a test.
What counts as truly distributed: the library sees two ranks; each sample goes to one of them; the
parameters of both are equal, are those of one process on the union of their batches (so gradients
were averaged), and are not those of a process that trained on its own batches alone.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import nbdist
from tests.thirdparty import task

ACCELERATE = """
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator()
model = fresh(); seen = watch(model)
optimizer = torch.optim.SGD(model.parameters(), lr=LR)
data = DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=True)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for epoch in range(2):
    for x, y in data:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
gathered = accelerator.gather(torch.tensor([float(rank)])).tolist()
made = dict(
    world=accelerator.num_processes, rank=accelerator.process_index, gathered=gathered,
    kind=str(accelerator.distributed_type), seen=seen,
    parameters=flat(accelerator.unwrap_model(model)),
)
"""

TRAINER = """
import lightning as L
from torch.utils.data import DataLoader, TensorDataset

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = fresh()
        self.seen = watch(self.net)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.net(x), y)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=LR)

net = Net()
trainer = L.Trainer(
    max_epochs=2, accelerator="cpu", devices=2, strategy=%r, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(net, DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=True))
made = dict(
    world=trainer.world_size, rank=trainer.global_rank, kind=type(trainer.strategy).__name__,
    loss=trainer.callback_metrics["train_loss"].item(), seen=net.seen, parameters=flat(net.net),
)
"""

FABRIC = """
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset

fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
model = fresh(); seen = watch(model)
optimizer = torch.optim.SGD(model.parameters(), lr=LR)
model, optimizer = fabric.setup(model, optimizer)
data = fabric.setup_dataloaders(DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=True))
for epoch in range(2):
    data.sampler.set_epoch(epoch)
    for x, y in data:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        fabric.backward(loss)
        optimizer.step()
made = dict(
    world=fabric.world_size, rank=fabric.global_rank, kind=type(fabric.strategy).__name__,
    gathered=fabric.all_gather(torch.tensor(float(rank))).tolist(), seen=seen,
    parameters=flat(model.module),
)
"""

TRANSFORMERS = """
from transformers import Trainer, TrainingArguments

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = fresh()

    def forward(self, x, labels):
        out = self.net(x)
        return {"loss": torch.nn.functional.mse_loss(out, labels), "logits": out}

model = Model(); seen = watch(model.net)
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir="out", per_device_train_batch_size=4, num_train_epochs=2, learning_rate=LR,
        optim="sgd", lr_scheduler_type="constant", max_grad_norm=0, logging_steps=2,
        report_to="none", save_strategy="no", disable_tqdm=True,
    ),
    train_dataset=[{"x": x, "labels": y} for x, y in zip(X, Y)],
)
result = trainer.train()
made = dict(
    world=trainer.args.world_size, rank=trainer.args.process_index,
    kind=str(trainer.args.parallel_mode), loss=result.training_loss, seen=seen,
    parameters=flat(model.net),
)
"""


def check_distributed(made: list[dict[str, Any]]) -> None:
    assert [m["world"] for m in made] == [2, 2]
    assert [m["rank"] for m in made] == [0, 1]
    first, second = made
    # 2 epochs of 4 steps of 4 samples on each rank: every sample once an epoch.
    assert [[len(batch) for batch in m["seen"]] for m in made] == [[4] * 8] * 2
    for epoch in (slice(0, 4), slice(4, 8)):
        samples = [i for m in made for batch in m["seen"][epoch] for i in batch]
        assert sorted(samples) == list(range(task.N))
    together = task.replay([a + b for a, b in zip(first["seen"], second["seen"], strict=True)])
    for m in made:
        assert torch.equal(m["parameters"], first["parameters"])
        assert (m["parameters"] - together).abs().max() < 1e-5
        assert (m["parameters"] - task.replay(m["seen"])).abs().max() > 1e-3


LOOPS = {
    "accelerate": (ACCELERATE, "DistributedType.MULTI_CPU"),
    "lightning ddp": (TRAINER % "ddp", "DDPStrategy"),
    "lightning auto": (TRAINER % "auto", "DDPStrategy"),
    "fabric": (FABRIC, "DDPStrategy"),
    "transformers": (TRANSFORMERS, "ParallelMode.DISTRIBUTED"),
}


@pytest.mark.parametrize("library", LOOPS)
def test_a_loop_is_truly_distributed_twice_in_the_same_engines_and_is_tracked(
    library: str, session: nbdist.Session, newest_run: Callable[[], Any]
) -> None:
    cell, kind = LOOPS[library]
    for time in ("first", "second"):
        session.run(cell, run_name=f"{library}, {time}")
        made = session.pull("made")
        assert {m["kind"] for m in made} == {kind}
        check_distributed(made)
        run = newest_run()
        assert run.name == f"{library}, {time}"
        assert run.steps == 8
        assert 0 < run.values["loss"] < 10
        assert run.world_size == 2
        if "gathered" in made[0]:
            assert made[0]["gathered"] == [0.0, 1.0]


METRIC = """
from torchmetrics.classification import BinaryAccuracy

predicted = torch.tensor([1, 1, 0, 0, 1])
target = torch.tensor([1, 1, 0, 0, 0] if rank else [0, 0, 1, 1, 1])
metric = BinaryAccuracy()
local = metric(predicted, target)
round(local.item(), 4), round(metric.compute().item(), 4)
"""


def test_torchmetrics_agree_over_the_ranks(session: nbdist.Session) -> None:
    for _ in range(2):
        assert session.run(METRIC).value_list == [(0.2, 0.5), (0.8, 0.5)]


# What starts processes of its own has no place on a rank, which is one of the processes.

LAUNCHER = """
from accelerate import Accelerator, notebook_launcher
Accelerator()
notebook_launcher(print, num_processes=2)
"""


def test_notebook_launcher_on_a_rank_is_refused_and_harms_nothing(session: nbdist.Session) -> None:
    with pytest.raises(nbdist.RankError, match="notebook_launcher") as raised:
        session.run(LAUNCHER)
    assert {name for name, _ in raised.value.failures.values()} == {"ValueError"}


DDP_NOTEBOOK = """
import lightning as L
L.Trainer(
    accelerator="cpu", devices=2, strategy="ddp_notebook", max_epochs=1, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
).fit(Net(), DataLoader(TensorDataset(X, Y), batch_size=4))
"""


def test_ddp_notebook_on_a_rank_is_refused_and_harms_nothing(session: nbdist.Session) -> None:
    session.run(TRAINER % "ddp")  # defines Net
    with pytest.raises(nbdist.RankError, match="A rank cannot fork 2 more ranks") as raised:
        session.run(DDP_NOTEBOOK, timeout_s=30)
    assert 'strategy="ddp"' in str(raised.value)
