"""What PyTorch's own tutorials and examples do, in cells, twice in one session.

Each program is written anew in the spirit of one of them: it sets the group up and destroys it, as
a script does, and ends with a number that one process computes as well.
"""

from textwrap import dedent

import pytest

from nbdist import Session

SETUP = """
import os
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F
os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "12355"
dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=2)
torch.manual_seed(0)
"""
CLEANUP = """
dist.destroy_process_group()
found
"""

# dist_tuto: point to point, collectives, and averaging gradients by hand.
DIST_TUTO = """
def send_and_receive():
    tensor = torch.zeros(1)
    if dist.get_rank() == 0:
        tensor += 1
        request = dist.isend(tensor=tensor, dst=1)
    else:
        request = dist.irecv(tensor=tensor, src=0)
    request.wait()
    return tensor.item()

def average_gradients(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
        parameter.grad /= dist.get_world_size()

net = nn.Linear(4, 1); opt = torch.optim.SGD(net.parameters(), lr=0.1)
data = torch.arange(16.0).view(4, 4) / 16
for _ in range(3):
    opt.zero_grad()
    net(data[2 * dist.get_rank():][:2]).square().mean().backward()
    average_gradients(net); opt.step()
group = dist.new_group([0, 1]); ones = torch.ones(1); dist.all_reduce(ones, group=group)
torch.manual_seed(0)
alone = nn.Linear(4, 1); one = torch.optim.SGD(alone.parameters(), lr=0.1)
for _ in range(3):
    one.zero_grad(); alone(data).square().mean().backward(); one.step()
found = (send_and_receive(), ones.item(), torch.allclose(net.weight, alone.weight, atol=1e-6))
"""

# The DDP series: a Trainer with a sampler, snapshots, and a model in two parts.
DDP_SERIES = """
import tempfile
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

class Trainer:
    def __init__(self, model, data, opt, folder):
        self.rank = dist.get_rank()
        self.model, self.data, self.opt = DDP(model), data, opt
        self.file, self.epochs = os.path.join(folder, "snapshot.pt"), 0

    def epoch(self):
        self.data.sampler.set_epoch(self.epochs)
        for source, target in self.data:
            self.opt.zero_grad()
            F.cross_entropy(self.model(source), target).backward()
            self.opt.step()
        self.epochs += 1
        if self.rank == 0:
            torch.save({"model": self.model.module.state_dict(), "epochs": self.epochs}, self.file)

data = TensorDataset(torch.randn(32, 20), torch.randint(0, 4, (32,)))
loader = DataLoader(data, batch_size=4, shuffle=False, sampler=DistributedSampler(data))
model = nn.Linear(20, 4); opt = torch.optim.SGD(model.parameters(), lr=1e-2)
folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
dist.broadcast_object_list(folder)
trainer = Trainer(model, loader, opt, folder[0])
for _ in range(2): trainer.epoch()
dist.barrier()
saved = torch.load(trainer.file, map_location="cpu", weights_only=True)
found = (saved["epochs"], torch.equal(saved["model"]["weight"], model.weight))
"""

# minGPT-ddp: a small transformer, a GradScaler that is off, clipped gradients.
MINGPT = """
from torch.nn.parallel import DistributedDataParallel as DDP

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))

class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.Sequential(Block(8), Block(8))
        self.head = nn.Linear(8, 11, bias=False)

    def forward(self, tokens, targets):
        logits = self.head(self.blocks(self.embed(tokens)))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

def train(model, part):
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for _ in range(3):
        _, loss = model(part[:, :-1], part[:, 1:])
        opt.zero_grad(set_to_none=True)
        scaler.scale(loss).backward(); scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt); scaler.update()
    return model

text = torch.randint(0, 11, (4, 9))
torch.manual_seed(1); live = train(DDP(GPT().double()), text[2 * dist.get_rank():][:2])
torch.manual_seed(1); alone = train(GPT().double(), text)
found = all(torch.allclose(a, b, atol=1e-9)
            for a, b in zip(live.parameters(), alone.parameters()))
"""

FSDP2 = """
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy
from torch.distributed.checkpoint.state_dict import get_model_state_dict, StateDictOptions
from torch.distributed.tensor import DTensor
model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Sequential(nn.Linear(8, 8)))
for layer in model: fully_shard(layer, mp_policy=MixedPrecisionPolicy())
fully_shard(model)
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
x = torch.randn(4, 8)
for _ in range(3):
    model(x).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    opt.step(); opt.zero_grad()
whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
found = (all(isinstance(p, DTensor) for p in model.parameters()), len(whole) in (0, 4))
"""

TENSOR_PARALLEL = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, parallelize_module)

class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(F.relu(self.up(self.norm(x))))

mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
model = Toy()
x = torch.randn(2, 4, 8)
expected = model(x).sum().item()
model = parallelize_module(model, mesh["tp"], {
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Replicate()),
})
opt = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
part = x.chunk(2, dim=1)[dist.get_rank()]
out = model(part)
out = out.full_tensor() if hasattr(out, "full_tensor") else out
found = abs(out.sum().item() - expected) < 1e-4
out.sum().backward(); opt.step()
"""

PIPELINING = """
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
first, second = nn.Linear(8, 8), nn.Linear(8, 1)
x, y = torch.randn(8, 8), torch.randn(8, 1)
expected = F.mse_loss(second(first(x)), y).item()
rank = dist.get_rank()
stage = PipelineStage((first, second)[rank], rank, 2, torch.device("cpu"))
schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=F.mse_loss)
losses = []
schedule.step(x) if rank == 0 else schedule.step(target=y, losses=losses)
found = rank == 0 or abs(torch.stack(losses).mean().item() - expected) < 1e-5
"""

JOIN = """
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
model = DDP(nn.Linear(1, 1))
opt = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
inputs = [torch.tensor([1.0]) for _ in range(5 + dist.get_rank())]
count = 0
with Join([model, opt]):
    for one in inputs:
        count += 1
        model(one).sum().backward(); opt.step()
with model.join():
    for one in inputs:
        model(one).sum().backward()
found = count
"""

COMM_HOOKS = """
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP
norms = []
for state, hook in (
    (None, default_hooks.fp16_compress_hook),
    (powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2),
     powerSGD_hook.powerSGD_hook),
):
    model = DDP(nn.Linear(16, 16)); model.register_comm_hook(state, hook)
    for _ in range(4): model(torch.ones(2, 16) * (1 + dist.get_rank())).sum().backward()
    norm = next(model.parameters()).grad.norm(); both = norm.clone(); dist.all_reduce(both)
    norms.append(bool(torch.isclose(both, 2 * norm)))
found = norms
"""

DEVICE_MESH = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
model = fully_shard(nn.Linear(8, 8), mesh=mesh)
model(torch.ones(2, 8)).sum().backward()
ranks = dist.get_process_group_ranks(mesh.get_group("shard"))
found = (ranks, mesh["shard"].get_local_rank() == dist.get_rank())
"""

ASYNC_CHECKPOINT = """
import tempfile
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
for layer in model: fully_shard(layer)
fully_shard(model)
opt = torch.optim.Adam(model.parameters(), lr=0.1)
beside = dist.new_group(backend="gloo")
folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
dist.broadcast_object_list(folder)
future = None
for step in range(2):
    model(torch.ones(2, 8)).sum().backward(); opt.step(); opt.zero_grad()
    weights, states = get_state_dict(model, opt)
    if future is not None: future.result()
    future = dcp.async_save({"model": weights, "optimizer": states},
                            checkpoint_id=f"{folder[0]}/{step}", process_group=beside)
future.result()
kept = model[0].weight.full_tensor().clone()
model(torch.ones(2, 8)).sum().backward(); opt.step()
weights, states = get_state_dict(model, opt)
dcp.load({"model": weights, "optimizer": states}, checkpoint_id=f"{folder[0]}/1")
set_state_dict(model, opt, model_state_dict=weights, optim_state_dict=states)
found = torch.equal(kept, model[0].weight.full_tensor())
"""

PROGRAMS = {
    "dist_tuto": (DIST_TUTO, [(1.0, 2.0, True)] * 2),
    "ddp series": (DDP_SERIES, [(2, True)] * 2),
    "minGPT": (MINGPT, [True] * 2),
    "FSDP2": (FSDP2, [(True, True)] * 2),
    "tensor parallel": (TENSOR_PARALLEL, [True] * 2),
    "pipelining": (PIPELINING, [True] * 2),
    "Join": (JOIN, [5, 6]),
    "comm hooks": (COMM_HOOKS, [[True, True]] * 2),
    "device mesh": (DEVICE_MESH, [([0, 1], True)] * 2),
    "async checkpoint": (ASYNC_CHECKPOINT, [True] * 2),
}


# What rules rightly say: as in its tutorial, nothing zeroes the gradients there.
SAID = {"Join": {"forgotten-zero-grad"}}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_tutorial_runs_in_a_cell_twice_with_its_setup_and_its_cleanup(
    session: Session, name: str
) -> None:
    program, expected = PROGRAMS[name]
    for _ in range(2):
        result = session.run(dedent(SETUP) + program + CLEANUP, track=False, timeout_s=60)
        assert result.value_list == expected
        assert session.checks().found.keys() == SAID.get(name, set())
        assert "the ranks' own group is used" in result[0].text
