"""After a fault in a loop without `nbdist.loader` all ranks have counted the same steps."""

import pytest

from nbdist import RankError, Session

MAKE = """
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.ones(32, 2))
sampler = torch.utils.data.DistributedSampler(data, 2, rank)
n, st, has_failed = 0, {"n": 0}, False
def fail(at):
    global has_failed
    if rank == FAILS and n == at and not has_failed:
        has_failed = True
        raise ValueError("bad metric")
"""
LOOPS = {
    "range": "for i in range(8):\n    x = torch.ones(4, 2)\n",
    "while": "while n < 8:\n    x = torch.ones(4, 2)\n",
    "DataLoader": "for (x,) in torch.utils.data.DataLoader(data, 2, sampler=sampler):\n",
}
COUNTED = {
    "after the step": "    opt.step(); opt.zero_grad(); n += 1; st['n'] = n\n",
    "after the gradients are gone": "    opt.step()\n    opt.zero_grad()\n    n += 1\n",
}

SAME = "w = net.module.bias.detach().clone(); dist.all_reduce(w)\nbool(w == 2 * net.module.bias)"


@pytest.mark.parametrize("fails", [0, 1])
@pytest.mark.parametrize("counted", COUNTED.values(), ids=COUNTED)
@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_a_rank_that_lost_a_step_counts_as_its_peers_do(
    session: Session, loop: str, counted: str, fails: int
) -> None:
    session.run(MAKE.replace("FAILS", str(fails)), track=False)
    body = "    net(x).sum().backward()\n    fail(3)\n" + counted
    with pytest.raises(RankError, match="bad metric") as failed:
        session.run(loop + body, track=False)

    counts = session.run("n", track=False).value_list
    assert counts == [4, 4], failed.value
    session.retry()
    assert len(set(session.run("n", track=False).value_list)) == 1
    assert session.run(SAME, track=False).value_list == [True, True]


def test_ranks_that_stopped_between_two_steps_at_different_counts_are_named(
    session: Session,
) -> None:
    session.run(MAKE.replace("FAILS", "1"), track=False)
    with pytest.raises(RankError, match="bad metric") as failed:
        session.run(
            "for i in range(8):\n"
            "    n += 1\n"
            "    net(torch.ones(4, 2)).sum().backward()\n"
            "    fail(3)\n"
            "    if n % 2 == 0: opt.step(); opt.zero_grad()\n",
            track=False,
            retry=1,
        )
    assert "n is 4 on rank 0 and 3 on rank 1" in str(failed.value)
    # As the error says.
    session.run("n = 2", track=False)
    session.retry()
    assert session.run(SAME, track=False).value_list == [True, True]
    assert session.run("n", track=False).value_list == [10, 10]


@pytest.mark.parametrize("at", [5, 6])  # batches: right after the second step, and before a step
def test_a_counter_that_moves_before_its_step_is_not_said_to_lack_it(
    session: Session, at: int
) -> None:
    session.run(MAKE.replace("FAILS", "1") + "micro = 0\n", track=False)
    with pytest.raises(RankError, match="bad metric") as failed:
        session.run(
            "for i in range(8):\n"
            "    micro += 1\n"
            f"    if micro == {at}: fail(n)\n"
            "    net(torch.ones(4, 2)).sum().backward()\n"
            "    if micro % 2 == 0:\n"
            "        n += 1\n"
            "        opt.step(); opt.zero_grad()\n",
            track=False,
        )
    assert session.run("n", track=False).value_list == [2, 2]
    assert "half done" not in str(failed.value)
    assert "Whether n had followed step 2 of Linear is not known" in str(failed.value)
