"""`%dist verify` in a real kernel: the proof once, as text, and in words where there is none."""

from collections.abc import Sequence

import pytest

from nbdist import LayoutError, RankError, Session
from tests.cluster.conftest import Kernel

TRAINED = """
import torch.nn.functional as F
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
layout = nbdist.parallelize(net, "zero3")
held = lambda: [getattr(p, "_local_tensor", p).tolist() for p in net.parameters()]
before = held()
x, y = torch.randn(4, 4), torch.tensor([0, 1, 2, 0])
"""


def test_verify_proves_the_newest_layout_or_the_named_one(notebook: Kernel) -> None:
    assert notebook.cell(TRAINED).error is None
    guessed = notebook.run("%dist verify")
    assert guessed.error is None
    assert guessed.text.count("zero3 against one process on the same split: equal bit for bit") == 1
    assert "inputs were guessed" in guessed.text
    assert notebook.cell("layout.step(x, y, F.cross_entropy)").error is None
    for handle in ("layout", "net"):
        proven = notebook.run(f"%dist verify {handle}")
        assert proven.error is None
        assert "equal bit for bit over 3 steps" in proven.text
        assert "those of the last layout.step" in proven.text
    same = notebook.cell("print(held() == before)")
    assert "True" in same.text


def test_a_layout_that_has_made_no_step_is_verified_on_a_batch_that_is_found(
    notebook: Kernel,
) -> None:
    made = "from torch import nn\nnet = nn.Linear(4, 2)\nlayout = nbdist.parallelize(net, 'ddp')"
    assert notebook.cell(made).error is None
    found = notebook.run("%dist verify layout")
    assert found.error is None
    assert "equal" in found.text
    assert "could not be computed" not in found.text


def test_verify_names_what_differs(notebook: Kernel) -> None:
    assert notebook.cell(TRAINED.replace("zero3", "ddp")).error is None
    planted = "net[2].bias.register_hook(lambda g: g * 1.01); layout.step(x, y, F.cross_entropy)"
    assert notebook.cell(planted).error is None
    found = notebook.run("%dist verify layout")
    assert "DIFFERS: the gradient of 2.bias at step 1" in found.text


def test_what_has_no_layout_is_refused_in_words(notebook: Kernel) -> None:
    notebook.cell("number = 3")
    for handle, words in {"number": "number is a int", "nothing": "There is no nothing"}.items():
        refused = notebook.run(f"%dist verify {handle}")
        assert refused.error is not None
        assert refused.error[0] == "LayoutError"
        assert words in refused.error[2]


# A model with statistics in the middle of a training, and a loss by which rank 1 can go astray.
# It is asked `calls` times there: rank 1 has made a whole step of the proof at its second.
TRAINING = """
import os, signal
import torch.nn.functional as F
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 3))
layout = nbdist.parallelize(net, "ddp")
opt = torch.optim.AdamW(net.parameters(), lr=0.01)
x, y = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
astray, calls, where = None, 0, 2

def loss_of(out, y):
    global calls
    if rank == 1 and astray is not None:
        calls += 1
        if calls == where:
            other = astray(out, y)
            if other is not None:
                return other
    return F.cross_entropy(out, y)

for _ in range(2):
    opt.zero_grad()
    layout.step(x, y, loss_of)
    opt.step()

def held():
    states = [value for state in opt.state.values() for value in state.values()]
    tensors = [*net.parameters(), *net.buffers(), *states, torch.get_rng_state()]
    return [t.tolist() for t in tensors], [(m.training, getattr(m, "p", 0)) for m in net.modules()]

def gradients():
    return [None if p.grad is None else p.grad.tolist() for p in net.parameters()]

before = held(), gradients()
"""

# A fault, and an interrupt, cost gradients; on all ranks, in a proof as elsewhere.
SAME = "held() == before[0], gradients() in (before[1], [None] * 6)"
STEP = "layout.step(x, y, loss_of); opt.step(); layout.verify((x, y), loss_of).ok"


def assert_unharmed(session: Session, living: Sequence[int] = (0, 1)) -> None:
    found = session.run(SAME, track=False)
    assert [found[rank].value for rank in living] == [(True, True)] * len(living)
    session.run("astray = None", track=False)
    assert session.run(STEP, track=False).value_list == [True] * 2


ASTRAY = {
    "raises in its loss": ("1 / 0", "On rank 1 loss_fn fails: ZeroDivisionError"),
    "returns another shape": (
        "F.cross_entropy(out, y, reduction='none')",
        "On rank 1 loss_fn returns a tensor of shape (6,)",
    ),
    "branches around a collective": ("dist.broadcast(torch.ones(2), 0)", "broadcast"),
    "detaches its loss": (
        "F.cross_entropy(out, y).detach()",
        "DIFFERS: the gradient of 0.weight at step 2",
    ),
    "raises in its forward": ("setattr(net[3], 'weight', None)", "weight"),
}


@pytest.mark.parametrize("way", ASTRAY)
def test_a_rank_that_goes_another_way_ends_the_proof_for_all(session: Session, way: str) -> None:
    code, words = ASTRAY[way]
    session.run(f"{TRAINING}\nastray = lambda out, y: {code}", track=False)
    try:
        told = session.verify("layout")
    except (LayoutError, RankError) as error:
        told = str(error)
    assert words in told
    assert_unharmed(session)


@pytest.mark.slow
def test_an_interrupt_in_the_middle_of_a_proof_leaves_all_as_it_was(notebook: Kernel) -> None:
    stuck = "def astray(out, y):\n    pathlib.Path('proving').touch()\n    while True: pass"
    assert notebook.cell(f"import pathlib\n{TRAINING}\n{stuck}", "--no-track").error is None
    interrupted = """
import threading, signal, os, time, pathlib
def later():
    while not pathlib.Path("proving").exists(): time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=later).start()
%dist verify layout
"""
    ran = notebook.run(interrupted)
    assert ran.error is not None
    assert ran.error[0] == "KeyboardInterrupt"
    assert "nbdist/" not in ran.error[2]
    assert notebook.cell(SAME, "--no-track").text == "ranks 0-1 │ Out: (True, True)"
    assert "ranks 0-1 │ Out: True" in notebook.cell(f"astray = None\n{STEP}", "--no-track").text


def test_a_proof_is_no_cell_that_is_kept_or_retried(session: Session) -> None:
    session.run('net = torch.nn.Linear(4, 2); nbdist.parallelize(net, "ddp"); 7', track=False)
    last = session.last
    assert "equal bit for bit" in session.verify("net")
    assert session.last is last
    with pytest.raises(RankError):
        session.run("_missing", track=False)
    with pytest.raises(LayoutError):
        session.verify("nothing")
    session.run("_missing = 1", track=False)
    assert session.retry().value_list == [1] * session.world_size
    names = session.run("[n for n in globals() if 'nbdist' in n]", track=False).value_list
    assert names == [["nbdist"]] * session.world_size


def test_a_rank_killed_in_the_middle_of_a_proof_leaves_all_as_it_was(session: Session) -> None:
    kill = "astray = lambda out, y: os.kill(os.getpid(), signal.SIGKILL)"
    session.run(f"{TRAINING}\n{kill}", track=False)
    with pytest.raises(RankError, match=r"rank 1 .* died: killed by SIGKILL"):
        session.verify()
    assert_unharmed(session, living=[0])


def test_a_layout_whose_shards_went_with_a_process_is_refused_in_words_on_all_ranks(
    session: Session,
) -> None:
    # Another one goes on on the new process.
    session.run("other = torch.nn.Linear(3, 3)\nnbdist.parallelize(other, 'ddp')", track=False)
    session.run(TRAINED, track=False)
    session.restart("1")
    with pytest.raises(LayoutError, match="Rank 1 has no such layout") as told:
        session.verify()
    assert "a new process has no shards" in str(told.value)
    session.run("layout = net = other = None\nimport gc; gc.collect()", track=False)
