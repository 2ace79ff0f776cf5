"""What is for the notebook, for ranks, or makes ranks, says so where it is called elsewhere."""

import pytest

import nbdist
from nbdist import Session
from tests.cluster.conftest import Kernel


@pytest.mark.parametrize("call", ["start(n=2)", "attach()"])
def test_a_cluster_is_not_started_on_a_rank(call: str, session: Session) -> None:
    with pytest.raises(nbdist.RankError) as raised:
        session.run(f"nbdist.{call}")
    name = call.partition("(")[0]
    assert set(raised.value.failures) == {0, 1}
    for kind, text in raised.value.failures.values():
        assert kind == "UsageError"
        assert f"nbdist.{name} is for the notebook, and this cell runs on the ranks." in text


DEMO = """
import os
import torch.multiprocessing as mp
def demo(number, count):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "12355"
    dist.init_process_group("gloo", rank=number, world_size=count)
    told = torch.ones(1)
    dist.all_reduce(told)
    return told.item()
"""


@pytest.mark.parametrize(
    "call",
    [
        "mp.spawn(demo, args=(2,), nprocs=2)",
        "mp.start_processes(demo, (2,), 2, start_method='spawn')",
        "from torch.multiprocessing.spawn import spawn; spawn(demo, (2,), 2)",
    ],
)
def test_ranks_are_not_started_by_a_rank_which_is_told_what_to_call(
    call: str, session: Session
) -> None:
    with pytest.raises(nbdist.RankError, match="A rank cannot start 2 more ranks") as raised:
        session.run(DEMO + call)
    assert "call the function yourself" in str(raised.value)
    assert "as demo(rank, ...)" in str(raised.value)
    assert session.run("demo(rank, world_size)").value_list == [2.0, 2.0]


RPC = """
import torch.distributed.rpc as rpc
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size)
if rank == 0:
    remote = rpc.remote("worker1", torch.add, args=(torch.ones(1), 2))
    print(remote.to_here().item())
rpc.shutdown()
"""


@pytest.mark.slow
def test_rpc_in_a_second_cell_is_refused_where_it_would_wait(session: Session) -> None:
    session.run(RPC)
    with pytest.raises(nbdist.RankError, match="works only once") as raised:
        session.run(RPC, timeout_s=30)
    assert {kind for kind, _ in raised.value.failures.values()} == {"UsageError"}
    session.restart()
    session.run(RPC)


def test_the_notebook_knows_that_it_is_no_rank(notebook: Kernel) -> None:
    ran = notebook.run("from nbdist.shared import side; side.require_rank('nbdist.log')")
    assert ran.error is not None
    assert "nbdist.log is for ranks, and this cell runs in the notebook." in ran.error[1]
