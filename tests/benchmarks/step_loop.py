"""The training loops that `bench_step` times: the same text under torchrun and in a cell."""

STEP = """
import time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def processor_s(pids):
    # clock_getcpuclockid(3). psutil reads what counts in 10 ms, 50 us in each of 200 steps.
    return sum(time.clock_gettime(~pid << 3 | 2) for pid in pids)

def measure(width, settle, steps, others=()):
    '''Return us a step: this process's time on processors, wall time, and the time of others.

    Sums over all steps, not medians: what happens once in a while costs, too.
    '''
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 8)
    )
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x, y = torch.randn(32, width), torch.randint(0, 8, (32,))
    def clocks():
        return [time.process_time(), time.perf_counter(), *map(processor_s, others)]
    for i in range(settle + steps):
        if i == settle:
            began = clocks()
        loss = torch.nn.functional.cross_entropy(ddp(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [1e6 * (now - then) / steps for now, then in zip(clocks(), began, strict=True)]
"""

# Where a GPU computes, the host queues. A step's time on the host is therefore taken with nothing
# queued before it, and that of a collective as what more of them add to a step.
CUDA_STEP = """
import time
import torch, torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.heads, linear = width // 64, torch.nn.Linear
        self.before, self.between = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = linear(width, 3 * width), linear(width, width)
        self.up, self.down = linear(width, 4 * width), linear(4 * width, width)
    def forward(self, x):
        n, t, d = x.shape
        qkv = self.qkv(self.before(x)).view(n, t, 3, self.heads, 64).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(n, t, d))
        return x + self.down(F.gelu(self.up(self.between(x))))

def build(layers, width, tokens, batch):
    '''Return a model, its input and its targets: a GPT, or an MLP where it has no layers.'''
    nn = torch.nn
    if not layers:
        model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 8))
        return model, torch.randn(batch, width), torch.randint(0, 8, (batch,))
    blocks = [Block(width) for _ in range(layers)]
    model = nn.Sequential(nn.Embedding(8192, width), *blocks, nn.Linear(width, 8192, bias=False))
    text = torch.randint(0, 8192, (batch, tokens + 1))
    return model, text[:, :-1].contiguous(), text[:, 1:].flatten()

def measure(shape, settle, steps):
    '''Return us a step by the wall clock, and on the host; us of a collective; how many a step.'''
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    model, x, y = (part.to(device) for part in build(*shape))
    ddp = DistributedDataParallel(model, device_ids=[device.index])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    small = torch.ones(1, device=device)
    def step(more=0):
        for _ in range(more):
            dist.all_reduce(small, async_op=True).wait()
        with torch.autocast(device.type, torch.bfloat16):
            out = ddp(x)
        loss = F.cross_entropy(out.float().flatten(0, -2), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    def on_host(more):
        spent = 0.0
        for _ in range(steps):
            torch.cuda.synchronize()
            began = time.perf_counter()
            step(more)
            spent += time.perf_counter() - began
        return 1e6 * spent / steps
    for _ in range(settle):
        step()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    wall = 1e6 * (time.perf_counter() - began) / steps
    host = on_host(0)
    told = ddp._get_ddp_logging_data()
    buckets = str(told.get("rebuilt_bucket_sizes") or told["bucket_sizes"]).split(",")
    return [wall, host, (on_host(10) - host) / 10, len(buckets)]
"""

# Measures when it is asked to: a line of JSON in, the arguments; one out, what all ranks measured.
_SERVE = """
if __name__ == "__main__":
    import json, os, sys
    torch.set_num_threads(1)
    backend = sys.argv[1]
    if backend != "gloo":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend)
    while True:
        asked = [sys.stdin.readline() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(asked)
        if not asked[0]:
            break
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, measure(*json.loads(asked[0])))
        if dist.get_rank() == 0:
            print(json.dumps(found), flush=True)
    dist.destroy_process_group()
"""
SERVE = STEP + _SERVE
CUDA_SERVE = CUDA_STEP + _SERVE
