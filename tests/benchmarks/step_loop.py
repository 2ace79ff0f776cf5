"""The training loop that `bench_step` times: the same text under torchrun and in a cell."""

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

# Measures when it is asked to: a line of JSON in, the arguments; one out, what all ranks measured.
SERVE = (
    STEP
    + """
if __name__ == "__main__":
    import json, sys
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
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
)
