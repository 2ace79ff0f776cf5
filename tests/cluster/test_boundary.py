"""A fault between two ranks' steps, in real cells: what is said, and how the cell goes on."""

from nbdist import Session
from tests.cluster.test_faults import fail

BUILD = """
import torch.nn.functional as F
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
nbdist.parallelize(model, "ddp")
opt = torch.optim.Adam(model.parameters(), lr=1e-2)
samples = [torch.full((4,), float(i)) for i in range(64)]
breaks = {BREAKS}
made = []
_ = None
"""
TRAIN = """
for x in nbdist.loader(samples, global_batch=8):
    F.mse_loss(model(x), x.mean(1, keepdim=True)).backward()
    if breaks and rank == 1 and len(made) == 5:
        breaks = False
        raise ValueError("lost")
    opt.step(); opt.zero_grad()
    made.append(x[:, 0].tolist())
"""
STATE = "(made, [p.flatten().tolist() for p in [*model.parameters(), *model.buffers()]])"


def test_a_step_that_one_rank_lost_is_copied_said_and_retried_to_the_unbroken_end(
    session: Session,
) -> None:
    session.run(BUILD.replace("{BREAKS}", "False"), track=False)
    session.run(TRAIN, track=False)
    unbroken = session.run(STATE).value_list
    session.run(BUILD.replace("{BREAKS}", "True"), track=False)

    told = fail(session, TRAIN)

    assert "Rank 1 had lost step 6: it copied the model (Sequential)" in told
    session.run("if rank == 1: made.append(None)  # the step it has copied", track=False)
    assert session.retry().ok
    state = session.run(STATE).value_list
    assert [parameters for _, parameters in state] == [parameters for _, parameters in unbroken]
    assert state[0][0] == unbroken[0][0]
