"""Ranks' shares of the gradient norm add up to what torch finds; no collective is made for it."""

from __future__ import annotations

from math import sqrt
from typing import Any

import pytest

from tests.group.harness import run_ranks
from tests.group.models import gradients
from tests.group.test_training import Watch


def _watch() -> Watch:
    from nbdist.engine.training import training

    watch = Watch("full")
    training.here.set_enabled(True, grad_norm=True)
    training.here.begin_cell()
    return watch


def _wrapped(kind: str) -> Any:
    """Return a model spread over the ranks; both layers have a bias and a norm between them."""
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )
    from torch.nn.parallel import DistributedDataParallel

    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 6), nn.LayerNorm(6))
    size = dist.get_world_size()
    if kind == "one":
        return model
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp":
        return fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    if kind == "hsdp":
        return fully_shard(
            model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "fsdp"))
        )
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return model


def _norms(kind: str) -> Any:
    """Return torch's norm of each step and our shares; tensor parallel averages by hand over dp."""
    import torch
    import torch.distributed as dist

    from nbdist.engine.tap import tap

    torch.manual_seed(3)
    model = _wrapped(kind)
    watch = _watch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    place = dist.get_rank() // 2 if kind == "tp and dp" else dist.get_rank()
    generator = torch.Generator().manual_seed(place)
    norms = []
    for _ in range(3):
        x = torch.randn(5, 6, generator=generator)
        model(x).square().mul(x).mean().backward()
        if kind == "tp and dp":
            _average(model)
        if kind == "tp and dp":  # clipping takes no plain tensors beside DTensors
            whole = [_whole(parameter.grad) for parameter in model.parameters()]
            norm = torch.nn.utils.get_total_norm(whole)
        else:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        norms.append(_whole(norm).item())
        before = tap.counts()
        optimizer.step()
        # At its first step on shards an optimizer is tried on small tensors, which are gathered.
        assert len(norms) == 1 or tap.counts() == before
        optimizer.zero_grad()
    return norms, watch.rows(), watch.facts


def _whole(tensor: Any) -> Any:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _average(model: Any) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for parameter in model.parameters():
        local = getattr(parameter.grad, "_local_tensor", parameter.grad)
        dist.all_reduce(local, dist.ReduceOp.SUM, mesh.get_group("dp"))
        local /= 2


@pytest.mark.parametrize(
    ("kind", "ranks"), [("one", 1), ("ddp", 2), ("fsdp", 2), ("hsdp", 4), ("tp and dp", 4)]
)
def test_shares_add_up_to_the_norm_that_clipping_finds(kind: str, ranks: int) -> None:
    told = run_ranks(ranks, _norms, kind)
    assert all(facts == {} for _, _, facts in told)
    for step in range(3):
        shares = [rows[step]["grad_share"] for _, rows, _ in told]
        for norms, _, _ in told:
            assert norms[step] > 0.01
            assert sqrt(sum(shares)) == pytest.approx(norms[step], rel=1e-5)


def _staged() -> Any:
    """Return the squares of this stage's gradients, and our shares, of a pipeline of two."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed import pipelining
    from torch.nn.functional import mse_loss

    torch.manual_seed(dist.get_rank())
    part = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    stage = pipelining.PipelineStage(part, dist.get_rank(), 2, torch.device("cpu"))
    pipe = pipelining.ScheduleGPipe(stage, n_microbatches=2, loss_fn=mse_loss)
    watch = _watch()
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    squares = []
    for _ in range(3):
        x, y = torch.ones(4, 4), torch.zeros(4, 4)
        pipe.step(x) if dist.get_rank() == 0 else pipe.step(target=y)
        squares.append(sum(float(g.square().sum()) for g in gradients(part).values()))
        optimizer.step()
        optimizer.zero_grad()
    return squares, watch.rows(), watch.facts


def test_stages_of_a_pipeline_hold_gradients_of_their_own_and_the_last_alone_has_a_loss() -> None:
    for rank, (squares, rows, facts) in enumerate(run_ranks(2, _staged)):
        assert facts == {}
        assert [row["step"] for row in rows] == [1, 2, 3]
        assert [row["grad_share"] for row in rows] == pytest.approx(squares, rel=1e-5)
        assert all(("loss" in row) == (rank == 1) for row in rows)
        assert all(row["backward_s"] > 0 and row["forward_s"] > 0 for row in rows[1:])


def _untellable() -> Any:
    """Return whether there was a share: of sparse gradients, of Partial ones, unscaled, in turn."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate

    watch = _watch()
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    table(torch.tensor([1, 2])).sum().backward()
    optimizer.step()

    mesh = init_device_mesh("cpu", (1,))
    weight = nn.Parameter(DTensor.from_local(torch.ones(3), mesh, [Replicate()]))
    weight.grad = DTensor.from_local(torch.ones(3), mesh, [Partial()])
    try:
        torch.optim.SGD([weight], lr=0.1).step()
    except Exception:  # whether torch can do it is not the question
        watch.facts["torch"] = "refused"
    weight.grad = None
    return [row.get("grad_share") for row in watch.rows()], watch.facts


def test_gradients_of_which_no_rank_can_tell_its_share_have_none() -> None:
    ((shares, facts),) = run_ranks(1, _untellable)
    assert shares
    assert set(shares) == {None}
    assert not [name for name in facts if name.startswith("hook_")]


def _with_closures() -> Any:
    import torch

    watch = _watch()
    weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = weight.square().sum() / 2  # its gradient is the weight
        loss.backward()
        return loss

    norms = []
    for _ in range(3):
        norms.append(weight.norm().item())
        optimizer.step(closure)
    return norms, watch.rows()


def test_gradients_made_in_a_closure_are_those_that_count() -> None:
    ((norms, rows),) = run_ranks(1, _with_closures)
    assert [sqrt(row["grad_share"]) for row in rows] == pytest.approx(norms)
