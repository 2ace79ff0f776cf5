"""Libraries run unmodified in a cell, truly distributed, again and again in the same engines.

Beside nbdist they spread a model themselves; on top of it they get one that has a layout. What
counts as truly distributed: the library sees two ranks; each sample goes to one of them; the
parameters of both are equal, are those of one process on the union of their batches (so gradients
were averaged), and are not those of a process that trained on its own batches alone.
"""

import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch

import nbdist
from tests.thirdparty import task
from tests.thirdparty.cells import (
    ACCELERATE,
    ACCELERATE_TP,
    DDP_NOTEBOOK,
    FABRIC,
    FABRIC_SPREAD,
    LAUNCHER,
    LLAMA,
    METRIC,
    METRIC_OF_LAYOUT,
    TRAINER,
    TRAINER_SPREAD,
    TRANSFORMERS,
)

PLAN = 'nbdist.TensorParallel(plan={"0": "column", "2": "row"})'


def spread_by_fabric(how: str, tp: int = 1) -> str:
    return FABRIC_SPREAD.replace("SPREAD", how).replace("TP", str(tp))


def with_layout(cell: str, layout: str) -> str:
    """Return the cell of a library with its model spread by nbdist, before the library gets it."""
    made = next(line for line in cell.splitlines() if line.startswith("model = "))
    return cell.replace(made, f'{made}\nnbdist.parallelize(model, "{layout}")')


def check_distributed(made: list[dict[str, Any]]) -> None:
    assert [m["world"] for m in made] == [2, 2]
    assert [m["rank"] for m in made] == [0, 1]
    first, second = made
    # 2 epochs of 4 steps of 4 samples on each rank: every sample once an epoch.
    assert [[len(batch) for batch in m["seen"]] for m in made] == [[4] * 8] * 2
    for epoch in (slice(0, 4), slice(4, 8)):
        samples = [i for m in made for batch in m["seen"][epoch] for i in batch]
        assert sorted(samples) == list(range(task.N))
    together = task.replay([a + b for a, b in zip(first["seen"], second["seen"], strict=True)])
    for m in made:
        assert torch.equal(m["parameters"], first["parameters"])
        assert (m["parameters"] - together).abs().max() < 1e-5
        assert (m["parameters"] - task.replay(m["seen"])).abs().max() > 1e-3


# What each library does by itself, and what it calls that.
BESIDE = {
    "accelerate": (ACCELERATE, "DistributedType.MULTI_CPU"),
    "lightning ddp": (TRAINER % "ddp", "DDPStrategy"),
    "lightning auto": (TRAINER % "auto", "DDPStrategy"),
    "fabric": (FABRIC, "DDPStrategy"),
    "fabric fsdp": (
        spread_by_fabric('fully_shard(model, mesh=mesh["data_parallel"])'),
        "ModelParallelStrategy",
    ),
    "transformers": (TRANSFORMERS, "ParallelMode.DISTRIBUTED"),
}


@pytest.mark.parametrize("library", BESIDE)
def test_a_loop_is_truly_distributed_twice_in_the_same_engines_and_is_tracked(
    library: str, session: nbdist.Session, newest_run: Callable[[], Any]
) -> None:
    cell, kind = BESIDE[library]
    for time in ("first", "second"):
        session.run(cell, run_name=f"{library}, {time}")
        assert session.checks().found == {}
        made = session.pull("made")
        assert {m["kind"] for m in made} == {kind}
        check_distributed(made)
        run = newest_run()
        assert run.name == f"{library}, {time}"
        assert run.steps == 8
        assert 0 < run.values["loss"] < 10
        assert run.world_size == 2
        if "gathered" in made[0]:
            assert made[0]["gathered"] == [0.0, 1.0]


# The same with a model that nbdist has spread.
MULTI_CPU = "DistributedType.MULTI_CPU"
ON_TOP = {
    "accelerate, ddp": (with_layout(ACCELERATE, "ddp"), MULTI_CPU),
    "accelerate, zero3": (with_layout(ACCELERATE, "zero3"), MULTI_CPU),
    "transformers, ddp": (with_layout(TRANSFORMERS, "ddp"), "ParallelMode.DISTRIBUTED"),
    "transformers, zero3": (with_layout(TRANSFORMERS, "zero3"), "ParallelMode.DISTRIBUTED"),
    "fabric, ddp": (
        spread_by_fabric('nbdist.parallelize(model, "ddp")'),
        "ModelParallelStrategy",
    ),
    "fabric, zero3": (
        spread_by_fabric('nbdist.parallelize(model, "zero3")'),
        "ModelParallelStrategy",
    ),
    "lightning, ddp": (TRAINER_SPREAD.replace("LAYOUT", '"ddp"'), "ModelParallelStrategy"),
    "lightning, zero3": (TRAINER_SPREAD.replace("LAYOUT", '"zero3"'), "ModelParallelStrategy"),
}


@pytest.mark.parametrize("library", ON_TOP)
def test_a_library_trains_a_model_that_has_a_layout_and_averages_once(
    library: str, session: nbdist.Session
) -> None:
    cell, kind = ON_TOP[library]
    if library.startswith("lightning"):
        session.run("import torch, lightning as L\n" + only_class_of(TRAINER), track=False)
    steps = session.run(cell + COUNTED, track=False).value_list
    assert session.checks().found == {}
    made = session.pull("made")
    assert {m["kind"] for m in made} == {kind}
    check_distributed(made)
    assert steps == [8, 8]


# What the board counts.
COUNTED = """
from nbdist.engine.training import training
training.here.current_step()
"""


def only_class_of(cell: str) -> str:
    return cell[: cell.index("net = Net()")]


TENSOR_PARALLEL = {
    "accelerate": ACCELERATE_TP.replace("PLAN", PLAN),
    "fabric": spread_by_fabric(f'nbdist.parallelize(model, "tp=2", {PLAN})', tp=2),
}


@pytest.mark.parametrize("library", TENSOR_PARALLEL)
def test_ranks_of_tp_get_the_same_samples_from_a_library(
    library: str, session: nbdist.Session
) -> None:
    session.run(TENSOR_PARALLEL[library], track=False)
    assert session.checks().found == {}
    first, second = session.pull("made")
    assert first["seen"] == second["seen"]
    assert sorted(i for batch in first["seen"][:8] for i in batch) == list(range(task.N))
    assert len(first["seen"]) == 16
    for m in (first, second):
        assert (m["parameters"] - task.replay(first["seen"])).abs().max() < 1e-5


def test_accelerate_takes_a_loader_of_nbdist_as_it_is(session: nbdist.Session) -> None:
    made = "DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=True)"
    cell = ACCELERATE.replace(made, "nbdist.loader(TensorDataset(X, Y), global_batch=8)")
    assert cell != ACCELERATE
    session.run(with_layout(cell, "ddp"), track=False)
    check_distributed(session.pull("made"))


MIXED = """
from accelerate import Accelerator
from accelerate.state import AcceleratorState

AcceleratorState._reset_state()
model = fresh()
nbdist.parallelize(model, "ddp")
prepared = Accelerator(mixed_precision="bf16").prepare(model)
inside = []
model[1].register_forward_hook(lambda module, inputs, output: inside.append(inputs[0].dtype))
out = prepared(X)
AcceleratorState._reset_state()
str(inside[0]), str(out.dtype), prepared is model
"""


def test_accelerate_brings_its_mixed_precision_to_a_layout(session: nbdist.Session) -> None:
    results = session.run(MIXED, track=False).value_list
    assert results == [("torch.bfloat16", "torch.float32", True)] * 2


@pytest.mark.slow
def test_the_trainer_clips_accumulates_and_evaluates_a_layout_as_it_does_its_own(
    session: nbdist.Session,
) -> None:
    session.run(LLAMA, track=False)
    own, ddp, zero3 = (
        session.run(f"train({how})", track=False).value_list
        for how in ("None, 'no'", "'ddp', 'epoch'", "'zero3', 'no'")
    )
    assert own[0] == own[1]
    # Loss and norm of each of 4 steps, one evaluation.
    assert len(own[0]) == 9
    for found in (ddp, zero3):
        assert found == [pytest.approx(own[0], rel=1e-4)] * 2


def test_the_trainer_says_first_that_it_cannot_save_shards(session: nbdist.Session) -> None:
    session.run(LLAMA, track=False)
    refused(session, "train('zero3', 'epoch')", "The Trainer saves what rank 0 holds, and of the l")


def test_torchmetrics_agree_over_the_ranks(session: nbdist.Session) -> None:
    for _ in range(2):
        assert session.run(METRIC).value_list == [(0.2, 0.5), (0.8, 0.5)]


def test_torchmetrics_sum_over_the_ranks_of_a_layout(session: nbdist.Session) -> None:
    whole = torch.nn.functional.mse_loss(task.fresh()(task.X), task.Y).item()
    assert session.run(METRIC_OF_LAYOUT).value_list == [pytest.approx(whole, rel=1e-5)] * 2


# ---- What is refused, in a sentence, on every rank and before anything is changed ---------------

SPREAD_ONCE = {
    "DistributedDataParallel": """
        model = fresh()
        nbdist.parallelize(model, "ddp")
        torch.nn.parallel.DistributedDataParallel(module=torch.nn.Sequential(model))
    """,
    "fully_shard": """
        from torch.distributed.fsdp import fully_shard
        model = fresh()
        nbdist.parallelize(model, "ddp")
        fully_shard(model[0])
    """,
    "FullyShardedDataParallel": """
        from torch.distributed.fsdp import FullyShardedDataParallel
        model = fresh()
        nbdist.parallelize(model, "zero3")
        FullyShardedDataParallel(model)
    """,
}


@pytest.mark.parametrize("by", SPREAD_ONCE)
def test_torch_may_not_spread_what_has_a_layout(by: str, session: nbdist.Session) -> None:
    refused(session, SPREAD_ONCE[by], f"{by} got a model that has the layout")


LIGHTNINGS_DDP = """
    from lightning.fabric import Fabric
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    model = fresh()
    nbdist.parallelize(model, "zero3")
    fabric.setup(model)
"""


def test_lightnings_ddp_on_a_layout_is_told_of_its_other_strategy(session: nbdist.Session) -> None:
    refused(session, LIGHTNINGS_DDP, "Lightning and Fabric do with ModelParallelStrategy")


WRAPPED = {
    "Fabric.setup": "fabric.setup(fresh())",
    r"Accelerator.prepare \(DistributedDataParallel\)": "Accelerator().prepare(fresh())",
    "DistributedDataParallel": "torch.nn.parallel.DistributedDataParallel(fresh())",
    "FullyShardedDataParallel": "FullyShardedDataParallel(fresh(), device_id=torch.device('cpu'))",
    "DistributedDataParallel, which holds it": "(ddp := DistributedDataParallel(fresh())).module",
}


@pytest.mark.parametrize("by", WRAPPED)
def test_what_a_library_has_spread_gets_no_layout(by: str, session: nbdist.Session) -> None:
    cell = f"""
        from accelerate import Accelerator
        from lightning.fabric import Fabric
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.nn.parallel import DistributedDataParallel
        fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
        fabric.launch()
        nbdist.parallelize({WRAPPED[by]}, "ddp")
    """
    refused(session, cell, rf"This model is spread already, by {by}\.")


ACCELERATE_CANNOT = {
    "some ranks need the same": f"""
        model = fresh()
        nbdist.parallelize(model, "tp=2", {PLAN})
        Accelerator().prepare(model)
    """,
    "loop over nbdist.loader": f"""
        model = fresh()
        nbdist.parallelize(model, "tp=2", {PLAN})
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        Accelerator().prepare(DataLoader(TensorDataset(X, Y)), optimizer)
    """,
    "A part of this model has the layout": """
        model = fresh()
        nbdist.parallelize(model, "ddp")
        Accelerator().prepare(torch.nn.Sequential(model, torch.nn.Linear(1, 1)))
    """,
    "Accelerate ignores its FSDP plugin on the CPU": """
        from accelerate import FullyShardedDataParallelPlugin
        Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    """,
    "Accelerate ignores its FSDP plugin": """
        from transformers import Trainer, TrainingArguments
        Trainer(model=fresh(), args=TrainingArguments(output_dir="out", fsdp="full_shard"))
    """,
}


@pytest.mark.parametrize("why", ACCELERATE_CANNOT)
def test_accelerate_says_what_it_cannot_do(why: str, session: nbdist.Session) -> None:
    imports = """
        from accelerate import Accelerator
        from torch.utils.data import DataLoader, TensorDataset
    """
    refused(session, imports + ACCELERATE_CANNOT[why], why)


def refused(session: nbdist.Session, cell: str, words: str) -> None:
    """Run a cell that a LayoutError ends on all ranks."""
    with pytest.raises(nbdist.RankError, match=words) as raised:
        session.run(textwrap.dedent(cell), track=False, timeout_s=60)
    names = {rank: name for rank, (name, _) in raised.value.failures.items()}
    assert names == {0: "LayoutError", 1: "LayoutError"}


# What starts processes of its own has no place on a rank, which is one of the processes.


@pytest.mark.parametrize("accelerator", ["", "Accelerator()"])
def test_notebook_launcher_on_a_rank_is_refused_and_harms_nothing(
    accelerator: str, session: nbdist.Session
) -> None:
    with pytest.raises(nbdist.RankError, match="A rank cannot start 2 more ranks") as raised:
        session.run(LAUNCHER.replace("ACCELERATOR", accelerator))
    assert {name for name, _ in raised.value.failures.values()} == {"UsageError"}
    assert "or to notebook_launcher" in str(raised.value)


def test_ddp_notebook_on_a_rank_is_refused_and_harms_nothing(session: nbdist.Session) -> None:
    session.run(TRAINER % "ddp")  # defines Net
    with pytest.raises(nbdist.RankError, match="A rank cannot start 2 more ranks") as raised:
        session.run(DDP_NOTEBOOK, timeout_s=30)
    assert {name for name, _ in raised.value.failures.values()} == {"UsageError"}
    assert 'strategy="ddp"' in str(raised.value)


def test_the_adapted_parts_of_the_libraries_are_there(session: nbdist.Session) -> None:
    cell = """
        import accelerate.accelerator
        from nbdist.engine.compat import torch_wrappers
        from nbdist.engine.compat.libraries import third_parties
        (third_parties.check(), torch_wrappers.check())
    """
    assert session.run(textwrap.dedent(cell), track=False).value_list == [([], [])] * 2
