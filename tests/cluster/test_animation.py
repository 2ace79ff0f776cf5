"""One step of a pipeline of real ranks, shown."""

import pytest

from nbdist import ClusterError, Session, UsageError

TRAIN = """
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
layout = nbdist.parallelize(model, "pp=2", nbdist.Pipeline(schedule="{schedule}", microbatches=4))
opt = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.linspace(-1, 1, 64).view(8, 8)
for _ in range(3):
    layout.step(x, x.flip(0), torch.nn.functional.mse_loss)
    opt.step()
    opt.zero_grad()
"""
RING = """
model = torch.nn.Linear(4, 4)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    model(torch.ones(1, 4)).sum().backward()
    dist.all_reduce(torch.ones(1000))
    opt.step()
"""


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_each_micro_batch_is_seen_forward_and_backward_on_each_stage(
    session: Session, schedule: str
) -> None:
    session.run(TRAIN.format(schedule=schedule), track=False)
    shown = str(session.animate()).splitlines()
    assert shown[0].startswith("Step 2 of a pipeline, as measured: 2 ranks, 4 micro-batches")
    halves = "FBW" if schedule == "zero-bubble" else "FB"
    stages = 2 if schedule == "zero-bubble" else 1
    for line in shown[1:]:
        done = [work.partition(".")[0] for work in line.split()[2:]]
        assert sorted(done) == sorted(stages * [f"{k}{n}" for k in halves for n in range(4)])


def test_a_training_without_pp_has_no_pipeline_to_show(session: Session) -> None:
    session.run("nbdist.log(loss=1.0)", track=False)
    with pytest.raises(ClusterError, match="no step of a pipeline"):
        session.animate()


def test_the_ring_of_the_largest_all_reduce_says_what_is_measured(session: Session) -> None:
    session.run(RING, track=False)
    shown = str(session.animate("ring"))
    assert "all_reduce of 4.0 kB on 2 ranks: in 2 rounds each rank sends 2.0 kB" in shown
    assert shown.endswith(
        "Bytes and time are measured, the order of the rounds is the algorithm's."
    )


def test_a_word_that_is_no_picture_is_refused(session: Session) -> None:
    with pytest.raises(UsageError, match='what is "pipeline" or "ring"'):
        session.animate("shards")
