"""After a fault nothing is copied between models that only look alike."""

import re

import pytest

from nbdist import RankError, Session

BEGIN = """
import hashlib, os, signal
def digest(model):
    parts = [p.detach().numpy().tobytes() for p in model.parameters()]
    return hashlib.sha1(b"".join(parts)).hexdigest()
def make(seed):
    torch.manual_seed(seed)
    return torch.nn.Linear(4, 2)
def train(model, opt, steps):
    for _ in range(steps):
        model(torch.ones(1, 4)).sum().backward(); opt.step(); opt.zero_grad()
"""
THREE = """
for seed in range(3):
    model = make(seed)
    {wrap}
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, opt, 3 + seed)
    if rank == 0 and seed == 1: best, best_opt = model, opt
    if seed == 0: first, first_opt = model, opt
import gc; gc.collect()  # wrapped models lie in cycles
"""
DIGESTS = "[digest(first), digest(model), digest(best) if globals().get('best') else None]"
WRAPS = {
    "a layout": "nbdist.parallelize(model, 'ddp')",
    "DDP": "model = torch.nn.parallel.DistributedDataParallel(model)",
}


def fails(session: Session, code: str) -> str:
    with pytest.raises(RankError) as error:
        session.run(code, track=False)
    return str(error.value)


@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(WRAPS["a layout"], id="a layout", marks=pytest.mark.slow),
        pytest.param(WRAPS["DDP"], id="DDP"),
    ],
)
def test_a_model_that_one_rank_alone_keeps_is_copied_over_no_other(
    session: Session, wrap: str
) -> None:
    session.run(BEGIN + THREE.format(wrap=wrap), track=False)
    before = session.run(DIGESTS).value_list

    told = fails(session, "if rank == 1: raise ValueError('a mistake')\ndist.barrier()")

    assert session.run(DIGESTS).value_list == before
    assert "copied" not in told
    assert "Rank 0 holds Linear, wrapped for ranks 0-1, and rank 1 does not" in told
    # Said once; and a replacement knows by their names the models that it got.
    told = fails(session, "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()")
    assert "left as it was" not in told
    late = "model(torch.ones(1, 4)).sum().backward()\nif rank: raise ValueError('late')\nopt.step()"
    told = fails(session, f"{late}\ndist.barrier()")
    assert "Rank 1 had lost step 6: it copied the model (Linear)" in told
    first, second = session.run(DIGESTS).value_list
    assert first == second
    assert first[0] == before[0][0]
    session.run("first = model = best = opt = first_opt = best_opt = None", track=False)


def test_a_replica_whose_states_were_lost_gets_no_other_models_weights(session: Session) -> None:
    session.run(
        f"{BEGIN}\n"
        "other = make(1); nbdist.parallelize(other, 'ddp')\n"
        "oo = torch.optim.SGD(other.parameters(), lr=0.1)\n"
        "model = make(0); layout = nbdist.parallelize(model, 'zero1')\n"
        "opt = layout.optimizer(torch.optim.Adam, lr=0.1)\n"
        "train(other, oo, 2); train(model, opt, 5)",
        track=False,
    )
    digests = "digest(other), digest(model)"
    before = session.run(digests).value_list

    told = fails(session, "if rank: os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()")
    assert "Rank 1 died with a part of the optimizer of Linear" in told
    told = fails(session, "train(model, opt, 1)")
    assert "make it again on every rank; the model itself is whole" in told
    assert "copied" not in told
    assert session.run(digests).value_list == before

    session.run("opt = layout.optimizer(torch.optim.SGD, lr=0.0); train(model, opt, 3)")
    assert session.run(digests).value_list == before
    session.run("other = model = layout = opt = oo = None", track=False)


def test_models_sharded_by_hand_that_one_rank_drops_are_told_apart(session: Session) -> None:
    session.run(
        f"{BEGIN}\n"
        "from torch.distributed.fsdp import fully_shard\n"
        "models, opts = [], []\n"
        "for seed in range(3):\n"
        "    models.append(fully_shard(make(seed)))\n"
        "    opts.append(torch.optim.Adam(models[-1].parameters(), lr=0.1))\n"
        "    train(models[-1], opts[-1], 2 + seed)\n"
        "def whole(model):\n"
        "    return [p.full_tensor().tolist() for p in model.parameters()]",
        track=False,
    )
    before = session.run("whole(models[0])").value_list
    session.run("if rank: del models[1], opts[1]", track=False)
    told = fails(session, "if rank: raise ValueError('a mistake')\ndist.barrier()")

    assert "rolled back" not in told
    assert "Rank 0 holds an optimizer of Linear that rank 1 does not" in told
    assert session.run("whole(models[0])").value_list == before
    session.run("train(models[-1], opts[-1], 1)", track=False)
    session.run("models = opts = None", track=False)


@pytest.mark.parametrize("before", ["messages", "a replacement"])
def test_what_only_some_ranks_have_sent_changes_no_name(session: Session, before: str) -> None:
    if before == "a replacement":
        session.restart("1")
    else:
        session.run("if rank: dist.send(torch.ones(3), 0)\nelse: dist.recv(torch.zeros(3), 1)")
    session.run(
        f"{BEGIN}\nmodel = make(0); nbdist.parallelize(model, 'ddp')\n"
        "opt = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "plan = torch.optim.lr_scheduler.StepLR(opt, 2)\ntrain(model, opt, 3)",
        track=False,
    )
    late = "model(torch.ones(1, 4)).sum().backward()\nif rank: raise ValueError('late')\nopt.step()"
    told = fails(session, f"{late}\ndist.barrier()")

    assert "Rank 1 had lost step 4: it copied the model (Linear)" in told
    first, second = session.run("digest(model)").value_list
    assert first == second
    session.run("model = opt = plan = None", track=False)


@pytest.mark.slow
def test_names_come_whole_to_a_replacement_that_cannot_have_all_they_are_of(
    session: Session,
) -> None:
    session.run(
        f"{BEGIN}\nfrom torch.distributed.optim import ZeroRedundancyOptimizer\n"
        "from torch.nn.parallel import DistributedDataParallel\n"
        "model = make(0); nbdist.parallelize(model, 'ddp')\n"
        "opt = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "other = DistributedDataParallel(make(1))\n"
        "zero = ZeroRedundancyOptimizer(other.parameters(), torch.optim.SGD, lr=0.1)\n"
        "late = torch.optim.SGD(make(2).parameters(), lr=0.1)",
        track=False,
    )
    # In its first step, in which the model holds its optimizer, which cannot travel.
    fails(
        session,
        "other(torch.ones(1, 4)).sum().backward()\n"
        "if rank == 0: os.kill(os.getpid(), signal.SIGKILL)\nzero.step()",
    )
    told = fails(session, "if rank: raise ValueError('a mistake')\ndist.barrier()")

    assert "does not" not in told
    session.run("train(model, opt, 2)", track=False)
    late = "model(torch.ones(1, 4)).sum().backward()\nif rank: raise ValueError('late')\nopt.step()"
    assert "Rank 1 had lost step 3" in fails(session, f"{late}\ndist.barrier()")
    session.run("model = opt = other = zero = late = None", track=False)


def test_what_only_the_dead_rank_held_is_named_and_a_placeholder(session: Session) -> None:
    session.run("shared, gone = 1, 2\nif rank == 1: only_here, also_this = 3.5, [1, 2]")
    with pytest.raises(RankError) as killed:
        session.run("del gone\nimport os\nif rank == 1: os.kill(os.getpid(), 9)\ndist.barrier()")

    named = re.search(r"Rank 1 is without ([^:]*): rank 0, from which it was", str(killed.value))
    assert named is not None
    assert {"only_here", "also_this"} <= set(named[1].split(", "))
    assert "gone" not in named[1]
    with pytest.raises(RankError, match="placeholder for what the process before held"):
        session.run("only_here.hex() if rank else shared")
    # Said once: another fault finds what is there.
    session.run("if rank == 1: del only_here, also_this")
    with pytest.raises(RankError) as again:
        session.run("import os\nif rank == 1: os.kill(os.getpid(), 9)\ndist.barrier()")
    assert "is without" not in str(again.value)
