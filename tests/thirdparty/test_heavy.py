"""DeepSpeed and torchft in cells: what they make of a model is what one process would have made.

Beside the markers these need `pip install -c constraints-thirdparty.txt .[thirdparty]`; DeepSpeed
builds its operators in the first of them.
"""

import textwrap
from importlib.util import find_spec

import pytest
import torch

import nbdist
from tests.thirdparty import task

HOW = "pip install -c constraints-thirdparty.txt '.[thirdparty]'"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

with_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason=f"DeepSpeed is not installed ({HOW})"
)
with_torchft = pytest.mark.skipif(
    find_spec("torchft") is None, reason=f"torchft is not installed ({HOW})"
)

DEEPSPEED = """
import deepspeed

net = fresh(); seen = watch(net)
config = {
    "train_micro_batch_size_per_gpu": 4, "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": STAGE}, **MORE,
}
engine, *_ = deepspeed.initialize(
    model=net, optimizer=torch.optim.SGD(net.parameters(), lr=LR), config=config
)
for epoch in range(2):
    for batch in torch.arange(N).view(-1, 2, 4)[:, rank].tolist():
        loss = torch.nn.functional.mse_loss(engine(X[batch]), Y[batch])
        engine.backward(loss)
        engine.step()
with deepspeed.zero.GatheredParameters(list(net.parameters())):
    made = dict(world=engine.dp_world_size, seen=seen, parameters=flat(net).clone())
"""

# DeepSpeed's own default, where the config is silent.
CLIPPED_TO = 1.0


@with_deepspeed
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_is_one_process_on_all_batches_and_counts_its_steps(
    stage: int, session: nbdist.Session
) -> None:
    cell = DEEPSPEED.replace("STAGE", str(stage)).replace("MORE", '{"gradient_clipping": 0.0}')
    for _ in range(2):
        counted = "\nfrom nbdist.engine.training import training\ntraining.here.current_step()"
        assert session.run(cell + counted, track=False).value_list == [8, 8]
        assert largest_difference(session, clip=None) < 1e-6


@with_deepspeed
@pytest.mark.parametrize("stage", [1, 3])
def test_zero_clips_gradients_where_its_config_is_silent(
    stage: int, session: nbdist.Session
) -> None:
    session.run(DEEPSPEED.replace("STAGE", str(stage)).replace("MORE", "{}"), track=False)
    assert largest_difference(session, clip=CLIPPED_TO) < 1e-6
    assert largest_difference(session, clip=None) > 1e-2


@with_deepspeed
def test_an_optimizer_of_deepspeed_counts_steps_too(session: nbdist.Session) -> None:
    own = """
        import deepspeed
        from nbdist.engine.training import training
        net = fresh()
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
            "zero_optimization": {"stage": 2},
        }
        engine, *_ = deepspeed.initialize(
            model=net, model_parameters=net.parameters(), config=config
        )
        for _ in range(3):
            engine.backward(torch.nn.functional.mse_loss(engine(X), Y))
            engine.step()
        training.here.current_step()
    """
    assert session.run(textwrap.dedent(own), track=False).value_list == [3, 3]


@with_deepspeed
@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("nbdist.parallelize(net, 'zero3'); start(net)", "DeepSpeed got a model that has the lay"),
        ("nbdist.parallelize(start(net)[0], 'ddp')", "This model is spread already, by DeepSpeed"),
        (
            "start(net); nbdist.parallelize(net, 'ddp')",
            "This model is spread already, by DeepSpeed",
        ),
    ],
)
def test_deepspeed_and_a_layout_are_told_of_each_other(
    cell: str, words: str, session: nbdist.Session
) -> None:
    start = """
        import deepspeed

        def start(net):
            config = {
                "train_micro_batch_size_per_gpu": 4, "zero_allow_untested_optimizer": True,
                "zero_optimization": {"stage": 3},
            }
            optimizer = torch.optim.SGD(net.parameters(), lr=LR)
            return deepspeed.initialize(model=net, optimizer=optimizer, config=config)

        net = fresh()
    """
    with pytest.raises(nbdist.RankError, match=words) as raised:
        session.run(textwrap.dedent(start) + cell, track=False)
    assert {name for name, _ in raised.value.failures.values()} == {"LayoutError"}


# Each rank is a replica of its own, with a store and a manager; rank 0 runs the lighthouse.
DILOCO = """
from datetime import timedelta
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo

address = [None]
if rank == 0:
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=1000)
    address = [lighthouse.address()]
dist.broadcast_object_list(address, 0)

model = fresh(); seen = watch(model)
inner = torch.optim.SGD(model.parameters(), lr=LR)
outer = torch.optim.SGD(model.parameters(), lr=1.0)
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
limit = timedelta(seconds=60)
manager = Manager(
    pg=ProcessGroupGloo(timeout=limit), min_replica_size=2, use_async_quorum=False,
    load_state_dict=lambda state: None, state_dict=dict, init_sync=False,
    rank=0, world_size=1, store_addr="127.0.0.1", store_port=store.port, hostname="127.0.0.1",
    lighthouse_addr=address[0], replica_id=f"replica-{rank}",
    timeout=limit, quorum_timeout=limit, connect_timeout=limit,
)
with DiLoCo(manager, [model], inner, outer, sync_every=EVERY):
    for batch in torch.arange(N).view(-1, 2, 4)[:, rank].tolist() * 2:
        inner.zero_grad()
        torch.nn.functional.mse_loss(model(X[batch]), Y[batch]).backward()
        inner.step()
syncs = manager.current_step()
manager.shutdown(wait=False)
dist.barrier()
if rank == 0:
    lighthouse.shutdown()
made = dict(world=2, seen=seen, parameters=flat(model), syncs=syncs)
"""


@with_torchft
def test_diloco_that_averages_every_step_is_one_process_on_all_batches(
    session: nbdist.Session,
) -> None:
    # With plain SGD inside and an outer step of 1, averaging weights is averaging gradients.
    for _ in range(2):
        session.run(DILOCO.replace("EVERY", "1"), track=False, timeout_s=120)
        assert largest_difference(session, clip=None) < 1e-6
        assert [made["syncs"] for made in session.pull("made")] == [8, 8]


@with_torchft
def test_diloco_that_averages_seldom_keeps_replicas_equal(session: nbdist.Session) -> None:
    session.run(DILOCO.replace("EVERY", "4"), track=False, timeout_s=120)
    assert largest_difference(session, clip=None) > 1e-3, "it is another algorithm"
    assert [made["syncs"] for made in session.pull("made")] == [2, 2]


def largest_difference(session: nbdist.Session, clip: float | None) -> float:
    """Compare the parameters, which are equal on both ranks, with one process' on all batches."""
    first, second = session.pull("made")
    assert first["world"] == second["world"] == 2
    assert torch.equal(first["parameters"], second["parameters"])
    together = [a + b for a, b in zip(first["seen"], second["seen"], strict=True)]
    assert [len(batch) for batch in together] == [8] * 8
    difference = first["parameters"] - task.replay(together, clip=clip)
    return float(difference.abs().max())
