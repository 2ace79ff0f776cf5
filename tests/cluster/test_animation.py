"""What real ranks did, shown: a step of a pipeline, a ring, parameters in shards."""

import re

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


SHARDS = """
torch.manual_seed(0)
blocks = (torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()) for _ in range(3))
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Sequential(*blocks))
layout = nbdist.parallelize(model, "{layout}")
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    layout.step(torch.ones(8, 4), torch.ones(8, 8), torch.nn.functional.mse_loss)
    opt.step()
    opt.zero_grad()
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
    with pytest.raises(UsageError, match='what is "pipeline", "ring" or "shards"'):
        session.animate("zero")


@pytest.mark.parametrize(
    ("layout", "does"),
    [
        ("zero3", "gathered freed gathered again freed gradients reduced"),
        ("zero2", "gathered freed gradients reduced"),
    ],
)
def test_each_block_is_seen_whole_only_between_its_gather_and_when_it_is_freed(
    session: Session, layout: str, does: str
) -> None:
    session.run(SHARDS.format(layout=layout), track=False)
    head, root, *blocks = str(session.animate("shards")).splitlines()
    assert re.match(r"Step 4 with parameters in shards on 2 ranks, as rank 0 measured it", head)
    assert ("at most 100 %" in head) == (layout == "zero2")
    assert root.startswith("0 (160 B): gathered")
    assert [line.partition(":")[0] for line in blocks] == [f"1.{at}.0 (288 B)" for at in range(3)]
    for line in (root, *blocks):
        moments = [
            float(number.replace(",", ""))
            for number in re.findall(r"[\d.,]*\d(?=[-, ]|$)", line.partition(": ")[2])
        ]
        assert moments == sorted(moments)
    for line in blocks:
        assert " ".join(re.findall("[a-z]{3,}", line.partition(": ")[2])) == does


def test_a_training_without_shards_has_none_to_show(session: Session) -> None:
    session.run(RING, track=False)
    with pytest.raises(ClusterError, match="no step with parameters in shards"):
        session.animate("shards")
