"""Weights that a loop changes after an optimizer's step: after a fault, made up for, or said."""

import pytest

from nbdist import RankError, Session

MAKE = """
torch.manual_seed(0)
net = torch.nn.Linear(8, 4)
if "LAYOUT" == "DDP":
    net = torch.nn.parallel.DistributedDataParallel(net)
    opt = torch.optim.SGD(net.parameters(), lr=0.5)
else:
    layout = nbdist.parallelize(net, "LAYOUT")
    opt = layout.optimizer(torch.optim.SGD, lr=0.5)
rows = [(torch.full((8,), i / 64), torch.zeros(4)) for i in range(64)]
data = nbdist.loader(rows, global_batch=8, shuffle=False)
n, has_failed = 0, not (FAILS)
def fail():
    global has_failed
    if n == 4 and not has_failed:
        has_failed = True
        raise ValueError("planted")
def local(tensor):
    return getattr(tensor, "_local_tensor", tensor)
"""
CLIP = "for p in net.parameters(): local(p.data).mul_(0.9)"
LOOP = """
for x, _ in data:
    (net(x) - 1).pow(2).sum().backward()
    opt.step()
    opt.zero_grad()
    n += 1
"""
CLIPS = f"{LOOP}    fail()\n    {CLIP}\n"
AVERAGES = f"""{LOOP}
    ema.update_parameters(net)
    kept = [p.detach().clone() for p in net.parameters()]
    with torch.no_grad():
        for p, q in zip(net.parameters(), ema.parameters()): p.copy_(q)
        net(x)
        for p, q in zip(net.parameters(), kept): p.copy_(q)
    fail()
"""
WEIGHTS = "[local(p.data).flatten().tolist() for p in net.parameters()]"


def make(session: Session, layout: str, fails: str) -> None:
    session.run(MAKE.replace("LAYOUT", layout).replace("FAILS", fails), track=False)


@pytest.mark.parametrize(("fails", "ranks"), [("True", "ranks 0-1"), ("rank == 1", "rank 1")])
@pytest.mark.parametrize("layout", ["DDP", "zero1", "zero3"])
def test_a_change_after_the_step_that_a_fault_has_prevented_is_named(
    session: Session, layout: str, fails: str, ranks: str
) -> None:
    make(session, layout, "False")
    session.run(CLIPS, track=False)
    undisturbed = session.run(WEIGHTS, track=False).value_list

    make(session, layout, fails)
    with pytest.raises(RankError, match="planted") as failed:
        session.run(CLIPS, track=False)
    said = f"half done on {ranks}: the change of the weights after opt.step() has not followed it"
    assert said in str(failed.value)
    # As the error says.
    session.run(CLIP, "all" if fails == "True" else "1", track=False)
    session.retry()
    assert session.run(WEIGHTS, track=False).value_list == undisturbed


def test_in_a_cells_first_step_it_is_said_that_it_is_not_known(session: Session) -> None:
    make(session, "DDP", "False")
    session.run(CLIPS, track=False)
    session.run("n, has_failed = 3, False", track=False)
    with pytest.raises(RankError, match="planted") as failed:
        session.run(CLIPS, track=False)
    said = "Whether the change of the weights after opt.step() had followed step 9"
    assert said in str(failed.value)


@pytest.mark.parametrize("layout", ["DDP", "zero1"])
def test_weights_that_are_lent_and_given_back_lack_nothing(session: Session, layout: str) -> None:
    make(session, layout, "True")
    session.run("ema = torch.optim.swa_utils.AveragedModel(net)", track=False)
    with pytest.raises(RankError, match="planted") as failed:
        session.run(AVERAGES, track=False)
    assert "half done" not in str(failed.value)
    assert "not known" not in str(failed.value)


@pytest.mark.parametrize("name", ["LocalSGD", "DiLoCo", "AsyncSGD"])
def test_what_an_optimizer_of_ours_averages_belongs_to_its_step(
    session: Session, name: str
) -> None:
    make(session, "DDP", "True")
    wrap = f"nbdist.{name}(sgd{', every=2' if name != 'AsyncSGD' else ''})"
    session.run(
        f"net = net.module\nsgd = torch.optim.SGD(net.parameters(), lr=0.1)\ndel opt\nopt = {wrap}",
        track=False,
    )
    with pytest.raises(RankError, match="planted") as failed:
        session.run(f"{LOOP}    fail()", track=False)
    assert "change of the weights" not in str(failed.value)
