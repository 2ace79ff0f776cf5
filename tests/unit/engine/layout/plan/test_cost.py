"""Closed formulas, against what was measured on a loopback by bytes."""

import pytest

from nbdist.engine.layout.axes.cp.exchange import context_bytes
from nbdist.engine.layout.axes.tp.cuts import token_bytes
from nbdist.engine.layout.plan.cost import (
    ModelSize,
    resident_bytes,
    shared_bytes,
    state_share,
)
from nbdist.engine.layout.plan.mesh import MeshShape


def sent_bytes(size: ModelSize, shape: MeshShape, backend: str) -> float:
    return sum(shared_bytes(size, shape, backend))


SIZE = ModelSize(3_263_000, 3_263_000, block_bytes=3_163_000, parameters=815_872)


@pytest.mark.parametrize(
    ("shape", "backend", "times_p"),
    [
        (MeshShape(dp=2), "gloo", 1.0),
        (MeshShape(dp=4), "nccl", 1.5),
        (MeshShape(dp=2, shards_states=True), "gloo", 1.5),
        (MeshShape(dp=4, shards_states=True), "nccl", 2.25),
        (MeshShape(fsdp=2, reshard_after_forward=False), "nccl", 1.0),
        (MeshShape(fsdp=2, reshard_after_forward=False), "gloo", 1.5),
        (MeshShape(fsdp=4, reshard_after_forward=False), "gloo", 2.25),
        (MeshShape(), "gloo", 0.0),
    ],
)
def test_a_step_sends_what_the_ring_needs(shape: MeshShape, backend: str, times_p: float) -> None:
    assert sent_bytes(SIZE, shape, backend) == pytest.approx(times_p * SIZE.parameter_bytes)


def test_zero3_gathers_blocks_twice_and_the_root_once() -> None:
    shape = MeshShape(fsdp=2)
    once = sent_bytes(SIZE, MeshShape(fsdp=2, reshard_after_forward=False), "gloo")
    assert sent_bytes(SIZE, shape, "gloo") - once == pytest.approx(SIZE.block_bytes / 2)


def test_replicas_of_shards_average_only_their_shard() -> None:
    both = sent_bytes(SIZE, MeshShape(dp=2, fsdp=2), "gloo")
    inside = sent_bytes(SIZE, MeshShape(fsdp=2), "gloo")
    assert both - inside == pytest.approx(SIZE.gradient_bytes / 2)


def test_shards_divide_what_a_rank_keeps_and_replicas_do_not() -> None:
    assert resident_bytes(SIZE, MeshShape(dp=4)) == 2 * SIZE.parameter_bytes
    assert resident_bytes(SIZE, MeshShape(dp=2, fsdp=2)) == SIZE.parameter_bytes


def test_zero1_shares_the_states_alone_and_fsdp_all() -> None:
    zero1 = MeshShape(dp=4, shards_states=True)
    assert (resident_bytes(SIZE, zero1), state_share(zero1)) == (2 * SIZE.parameter_bytes, 1 / 4)
    assert [state_share(s) for s in (MeshShape(dp=4), MeshShape(dp=2, fsdp=2))] == [1, 1 / 2]


def test_a_token_of_a_measured_gpt_sends_over_tp_what_was_measured() -> None:
    # 4 layers of 128 features in fp32: two sums forward and two backward a layer, a table of
    # tokens, and a head whose 64 logits are gathered. Measured with one sum a column: 26 sums.
    summed = [128 * 4] * (4 * 4 + 2)
    per_token = token_bytes(summed, [64 * 4], tp=2)
    assert per_token == 18 * 512 + 128
    assert token_bytes([512] * 26, [256], tp=2) * 16 * 64 == pytest.approx(13.811e6, rel=0.02)


def test_ranks_of_cp_hold_shards_beside_fsdp_and_replicas_without_it() -> None:
    assert sent_bytes(SIZE, MeshShape(fsdp=2, cp=2), "gloo") == sent_bytes(
        SIZE, MeshShape(fsdp=4), "gloo"
    )
    assert sent_bytes(SIZE, MeshShape(dp=2, cp=2), "gloo") == sent_bytes(
        SIZE, MeshShape(dp=4), "gloo"
    )
    assert resident_bytes(SIZE, MeshShape(fsdp=2, cp=2)) == resident_bytes(SIZE, MeshShape(fsdp=4))


@pytest.mark.parametrize(
    ("method", "cp", "backend", "per_layer"),
    [
        # Of a hidden state A: queries, keys, values and the result, to the other ranks and back.
        ("ulysses", 2, "gloo", 2.0),
        ("ulysses", 4, "nccl", 1.5),
        # Keys and values whole, and their gradients: reduce-scattered, on gloo all-reduced.
        ("gather", 2, "nccl", 2.0),
        ("gather", 2, "gloo", 3.0),
        ("gather", 4, "gloo", 4.5),
    ],
)
def test_a_token_sends_over_cp_what_attention_lacks(
    method: str, cp: int, backend: str, per_layer: float
) -> None:
    a, layers = 128.0, 3
    attended = [(a, 2 * a, a)] * layers
    sent = context_bytes(method, a, attended, cp=cp, backend=backend, loss=False)
    ends = 2 * (cp - 1) / cp
    assert sent == pytest.approx((layers * per_layer + ends) * a)


def test_a_loss_of_ones_own_part_gathers_no_hidden_states() -> None:
    both, own = (
        context_bytes("ulysses", 128.0, [], cp=2, backend="gloo", loss=loss)
        for loss in (False, True)
    )
    assert (both, own) == (128.0, 64.0)
