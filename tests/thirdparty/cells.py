"""What is run on the ranks: each cell is what a library's documents show, small enough for a test.

It leaves `made`: what the library saw of the ranks, the samples of each forward, the parameters.
"""

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

# Fabric with a strategy that leaves it to a function to spread the model.
FABRIC_SPREAD = """
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

def spread(model, mesh):
    SPREAD
    return model

fabric = Fabric(
    accelerator="cpu", devices=2, strategy=ModelParallelStrategy(
        spread, data_parallel_size=2 // TP, tensor_parallel_size=TP,
    ),
)
fabric.launch()
net = fresh()
model = fabric.setup(net); seen = watch(net)
optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=LR))
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
    seen=seen, parameters=flat(net),
)
"""

# After TRAINER, which defines Net.
TRAINER_SPREAD = """
from lightning.pytorch.strategies import ModelParallelStrategy

class SpreadNet(Net):
    def configure_model(self):
        nbdist.parallelize(self.net, LAYOUT)

net = SpreadNet()
trainer = L.Trainer(
    max_epochs=2, accelerator="cpu", devices=2, logger=False,
    strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(net, DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=True))
made = dict(
    world=trainer.world_size, rank=trainer.global_rank, kind=type(trainer.strategy).__name__,
    seen=net.seen, parameters=flat(net.net),
)
"""

# Ranks of tp share samples, which nbdist's loader knows.
ACCELERATE_TP = """
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator()
model = fresh()
nbdist.parallelize(model, "tp=2", PLAN); seen = watch(model)
optimizer = torch.optim.SGD(model.parameters(), lr=LR)
optimizer, data = accelerator.prepare(
    optimizer, nbdist.loader(TensorDataset(X, Y), global_batch=4)
)
for epoch in range(2):
    for x, y in data:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
made = dict(seen=seen, parameters=flat(model))
"""

LLAMA = """
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

def train(layout, save):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64, max_position_embeddings=32,
    ))
    if layout:
        nbdist.parallelize(model, layout)
    ids = torch.randint(0, 64, (32, 16), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in ids]
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir="llama", per_device_train_batch_size=2, gradient_accumulation_steps=2,
            num_train_epochs=1, learning_rate=0.01, max_grad_norm=0.5, logging_steps=1,
            report_to="none", save_strategy=save, disable_tqdm=True,
        ),
        train_dataset=data, eval_dataset=data[:8],
    )
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return [
        *(entry[name] for entry in steps for name in ("loss", "grad_norm")),
        trainer.evaluate()["eval_loss"],
    ]
"""

METRIC = """
from torchmetrics.classification import BinaryAccuracy

predicted = torch.tensor([1, 1, 0, 0, 1])
target = torch.tensor([1, 1, 0, 0, 0] if rank else [0, 0, 1, 1, 1])
metric = BinaryAccuracy()
local = metric(predicted, target)
round(local.item(), 4), round(metric.compute().item(), 4)
"""

# The model's layout has nothing to do with the metric, which sums over the ranks.
METRIC_OF_LAYOUT = """
from torchmetrics import MeanSquaredError

model = fresh()
nbdist.parallelize(model, "zero3")
metric = MeanSquaredError()
half = slice(rank * N // 2, (rank + 1) * N // 2)
with torch.no_grad():
    metric.update(model(X[half]), Y[half])
metric.compute().item()
"""

LAUNCHER = """
from accelerate import Accelerator, notebook_launcher
ACCELERATOR
notebook_launcher(print, num_processes=2)
"""

DDP_NOTEBOOK = """
import lightning as L
L.Trainer(
    accelerator="cpu", devices=2, strategy="ddp_notebook", max_epochs=1, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
).fit(Net(), DataLoader(TensorDataset(X, Y), batch_size=4))
"""
