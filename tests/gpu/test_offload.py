"""On one GPU: what waits in the host's memory comes back, and leaves room meanwhile."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu


def _blocks() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256)) for _ in range(4)]
    return nn.Sequential(*blocks).to("cuda")


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    import torch.distributed as dist

    where = f"file://{tmp_path / 'store'}"
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=where, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_activations_in_the_hosts_memory_leave_room_and_give_the_same_gradients() -> None:
    import torch

    from nbdist.engine.layout.policies import offload

    x = torch.randn(4096, 256, device="cuda")
    kept, gradients = [], []
    for offloads in (False, True):
        model = _blocks()
        if offloads:
            offload.apply(model.children())
        before = torch.cuda.memory_allocated()
        loss = model(x).square().mean()
        torch.cuda.synchronize()
        kept.append(torch.cuda.memory_allocated() - before)
        loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    assert kept[1] < 0.5 * kept[0]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.usefixtures("group")
def test_shards_lie_in_the_hosts_memory_and_learn_as_those_on_the_gpu() -> None:
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    from nbdist.engine.layout.axes import fsdp
    from nbdist.engine.layout.policies import offload
    from nbdist.engine.layout.policies.efficiency import FULL, Offload

    mesh = init_device_mesh("cuda", (1,), mesh_dim_names=("fsdp",))
    losses = []
    for policy in (None, Offload()):
        model = _blocks()
        fsdp.apply(
            model,
            model.children(),
            mesh,
            reshard_after_forward=True,
            in_precision=FULL,
            offloaded=offload.for_units(policy),
        )
        place = "cpu" if policy else "cuda"
        assert {p.device.type for p in model.parameters()} == {place}
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(64, 256, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
        for _ in range(4):
            loss = model(x).square().mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
            losses.append(loss.item())
    assert losses[4:] == pytest.approx(losses[:4], rel=1e-5)
    assert losses[3] < losses[0]
