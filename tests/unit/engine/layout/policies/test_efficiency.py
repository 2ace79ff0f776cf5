"""Policies refuse what they do not know, and cost what their formulas say."""

import pytest

from nbdist.engine.layout.plan import cost
from nbdist.engine.layout.plan.mesh import MeshShape
from nbdist.engine.layout.policies.efficiency import (
    ActivationCheckpoint,
    Compress,
    Offload,
    Precision,
)
from nbdist.shared.errors import LayoutError

SIZE = cost.ModelSize(4000, 4000, block_bytes=3000, parameters=1000)


def test_an_unknown_precision_is_refused_with_the_known_ones() -> None:
    with pytest.raises(LayoutError, match=r"compute is 'bfloat16'\."):
        Precision("bfloat16")  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="reduce is 'fp64'"):
        Precision("bf16", reduce="fp64")  # type: ignore[arg-type]


@pytest.mark.parametrize("every", [0, -1, 1.5, True])
def test_every_must_be_a_count(every: object) -> None:
    with pytest.raises(LayoutError, match="every is"):
        ActivationCheckpoint(every=every)  # type: ignore[arg-type]


def test_fsdp_gathers_in_the_precision_it_computes_in() -> None:
    shape = MeshShape(fsdp=2)
    full = sum(cost.shared_bytes(SIZE, shape, "nccl"))
    low = sum(cost.shared_bytes(SIZE, shape, "nccl", cost.wire(SIZE, shape, "bf16", "fp32")))
    assert full == (4000 + 3000 + 4000) / 2
    assert low == (2000 + 1500 + 4000) / 2


@pytest.mark.parametrize("shape", [MeshShape(dp=2), MeshShape(fsdp=2, reshard_after_forward=False)])
def test_gradients_in_bf16_are_half_as_many_bytes(shape: MeshShape) -> None:
    full = sum(cost.shared_bytes(SIZE, shape, "nccl"))
    low = sum(cost.shared_bytes(SIZE, shape, "nccl", cost.wire(SIZE, shape, "fp32", "bf16")))
    assert full - low == (2000 if shape.dp == 2 else 1000)


def test_autocast_sends_gradients_as_they_are() -> None:
    shape = MeshShape(dp=2)
    assert cost.wire(SIZE, shape, "bf16", "fp32") == cost.Wire()


@pytest.mark.parametrize(("backend", "inside"), [("nccl", 3000 + 1500), ("gloo", 6000 + 1500)])
def test_two_levels_send_a_slice_between_groups(backend: str, inside: int) -> None:
    # 16 ranks, 4 in a group: a slice is a quarter, halved by bf16, and a ring of 4 groups.
    assert cost.two_level_bytes(4000, 4, 4, backend, 0.5) == (inside, 2 * 3 / 4 * 500)


def test_groups_must_be_a_count_or_hosts_and_not_of_power_sgd() -> None:
    with pytest.raises(LayoutError, match=r"between is 'racks'.\nDo: +give \"hosts\" or a whole"):
        Compress("bf16", between="racks")  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="PowerSGD does not go between groups"):
        Compress("powersgd", between=2)


def test_an_offload_of_nothing_is_refused() -> None:
    with pytest.raises(LayoutError, match="offloads nothing"):
        Offload(parameters=False)
