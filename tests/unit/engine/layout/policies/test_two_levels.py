"""How ranks are cut into groups, and what cannot be offloaded."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from nbdist.engine.layout.parallelize import parallelize
from nbdist.engine.layout.plan.mesh import MeshShape, parse
from nbdist.engine.layout.policies import offload, two_levels
from nbdist.engine.layout.policies.efficiency import ActivationCheckpoint, Compress, Offload
from nbdist.shared.errors import LayoutError

ACTIVATIONS = Offload(parameters=False, activations=True)


@pytest.mark.parametrize(("between", "on_host", "size"), [("hosts", 4, 4), (2, 8, 2), (4, 2, 4)])
def test_groups_are_hosts_or_so_many_neighbours(between: str, on_host: int, size: int) -> None:
    policy = Compress("bf16", between=between)  # type: ignore[arg-type]
    assert two_levels.group_size(policy, 8, on_host) == size


@pytest.mark.parametrize(
    ("between", "on_host", "words"),
    [
        ("hosts", 8, "All 8 ranks are on one host"),
        ("hosts", 3, "3 ranks a host does not cut 8 ranks"),
        (3, 8, "between=3 does not cut 8 ranks"),
        (8, 8, "use one of 2, 4"),
        (1, 8, "between=1 does not cut"),
    ],
)
def test_ranks_that_cannot_be_grouped_are_told_with_the_numbers(
    between: str, on_host: int, words: str
) -> None:
    with pytest.raises(LayoutError, match=words):
        two_levels.group_size(Compress("bf16", between=between), 8, on_host)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("policy", "shape", "words"),
    [
        (Offload(), MeshShape(dp=2), 'needs shards, and the layout is "ddp"'),
        (Offload(), MeshShape(fsdp=2, tp=2), "does not go with tp yet"),
        (ACTIVATIONS, MeshShape(pp=2), "does not go with pp yet"),
        (ACTIVATIONS, MeshShape(dp=2), "finds no blocks"),
    ],
)
def test_what_cannot_be_offloaded_is_refused(policy: Offload, shape: MeshShape, words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        offload.check(policy, None, shape, {}, layout=shape.name, has_factory=False)


@pytest.mark.parametrize("layout", ["zero3", "fsdp=-1"])
def test_on_one_rank_the_refusal_names_what_was_asked_for_and_that_nothing_is_cut(
    layout: str,
) -> None:
    with pytest.raises(LayoutError) as refused:
        offload.check(Offload(), None, parse(layout, 1), {}, layout=layout, has_factory=False)
    assert str(refused.value) == (
        f'Offload(parameters=True) needs shards, and on one rank "{layout}" makes none.\n'
        "Why: fsdp cuts parameters over ranks, and one rank holds the whole model\n"
        "Do:  %dist scale 2, or more; or Offload(parameters=False, activations=True)"
    )


def test_on_one_rank_parallelize_speaks_of_the_layout_that_was_written() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(LayoutError, match='on one rank "zero3" makes none') as refused:
            parallelize(nn.Linear(2, 2), "zero3", Offload())
    finally:
        dist.destroy_process_group()
    assert "ddp" not in str(refused.value)


def test_offload_and_checkpoint_of_the_same_activations_are_refused() -> None:
    with pytest.raises(LayoutError, match="keep one"):
        offload.check(
            ACTIVATIONS,
            ActivationCheckpoint(),
            MeshShape(dp=2),
            {"0": nn.Linear(2, 2)},
            layout="ddp",
            has_factory=False,
        )


def test_a_model_on_the_cpu_is_told_that_there_is_nothing_to_offload() -> None:
    with pytest.raises(LayoutError, match="in the host's memory already"):
        offload.check_device("cpu")


def test_an_offloaded_block_has_the_gradients_of_the_plain_one() -> None:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    x = torch.randn(3, 4)
    block(x).square().sum().backward()
    expected = [p.grad for p in block.parameters()]
    block.zero_grad()
    offload.apply([block])
    block(x).square().sum().backward()
    assert all(
        torch.equal(p.grad, e)  # type: ignore[arg-type]
        for p, e in zip(block.parameters(), expected, strict=True)
    )
