"""The training loop that `bench_step` times: the same text under torchrun and in a cell.

Prints, a rank, the median processor time and wall time of a step in milliseconds, as JSON.
"""

STEP = """
import json, statistics, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def measure(width, steps, settle=30):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 8)
    )
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x, y = torch.randn(32, width), torch.randint(0, 8, (32,))
    cpu, wall = [], []
    for i in range(settle + steps):
        began_cpu, began = time.process_time(), time.perf_counter()
        loss = torch.nn.functional.cross_entropy(ddp(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if i >= settle:
            cpu.append(time.process_time() - began_cpu)
            wall.append(time.perf_counter() - began)
    return [1e3 * statistics.median(cpu), 1e3 * statistics.median(wall)]
"""

MAIN = (
    STEP
    + """
if __name__ == "__main__":
    import sys
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = measure(int(sys.argv[1]), int(sys.argv[2]))
    if dist.get_rank() == 0:
        print(json.dumps(result))
"""
)
