"""Advice that a session carries out: its code runs on ranks, and the best is measured."""

import functools
import re
from argparse import Namespace
from pathlib import Path

import pytest

from nbdist.client.advice.paste import lines
from nbdist.client.session.session import Session
from nbdist.study.advice import Candidate, Spread
from nbdist.study.step_time import StepTime

NAMES = """
def make():
    return torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()) for _ in range(4)),
        torch.nn.Linear(8, 2),
    )
generator = torch.Generator().manual_seed(0)
dataset = torch.utils.data.TensorDataset(
    torch.randn(32, 8, generator=generator), torch.randint(2, (32,), generator=generator)
)
lr = 0.1
"""


def code(spread: Spread, parts: int = 1, precision: str = "fp32", **other: bool) -> str:
    one = Candidate(spread, 4, parts, other.get("checkpoint", False), True, 0.0, StepTime(1.0))
    return lines(
        one,
        model="make",
        loss="torch.nn.functional.cross_entropy",
        optimizer="torch.optim.SGD",
        precision=precision,
        global_batch=8 * parts,
        reference_batch=4,
        rule="linear",
        warmup_steps=2,
    )


@pytest.mark.parametrize(
    "advised",
    [
        code(Spread(dp=2), parts=2),
        code(Spread(fsdp=2, stage=3), parts=2, precision="bf16", checkpoint=True),
        pytest.param(code(Spread(dp=2, stage=1)), marks=pytest.mark.slow),
        pytest.param(code(Spread(fsdp=2, stage=2)), marks=pytest.mark.slow),
        pytest.param(code(Spread(pp=2), parts=2), marks=pytest.mark.slow),
    ],
    ids=["ddp", "zero3", "zero1", "zero2", "pp"],
)
def test_the_advised_lines_train_on_two_ranks(session: Session, advised: str) -> None:
    result = session.run(f"{NAMES}\n{advised}", track=False)
    assert result.ok, result
    rate = session.run("optimizer.param_groups[0]['lr']", track=False)
    scaled = int(re.findall(r"global_batch=(\d+), reference", advised)[0]) / 4
    assert rate[0].value == pytest.approx(0.1 * scaled)


MIXTURE = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.unit.client.advice.mixture import make, V
def loss(outputs, y):
    return torch.nn.functional.cross_entropy(outputs.flatten(0, 1), y.flatten())
words = torch.randint(V, (32, 16), generator=torch.Generator().manual_seed(0))
dataset = torch.utils.data.TensorDataset(words, words)
lr = 0.1
"""


@pytest.mark.slow
def test_the_advised_lines_share_out_the_experts_of_a_model(session: Session) -> None:
    advised = code(Spread(ep=2), parts=2).replace("torch.nn.functional.cross_entropy", "loss")
    assert "layout.average" not in advised  # each backward averages
    result = session.run(f"{MIXTURE}\n{advised}", track=False)
    assert result.ok, result
    held = "[len(p.to_local()) for n, p in layout.model.named_parameters() if '1.experts' in n]"
    assert session.run(held, track=False)[0].value == [4, 4]


def test_accumulated_lines_give_the_gradients_of_one_step(session: Session) -> None:
    def weights(advised: str) -> list[float]:
        seeded = f"{NAMES}\ntorch.manual_seed(0)\n{advised}"
        assert session.run(seeded, track=False).ok
        flat = "[p.detach().double().sum().item() for p in layout.model.parameters()]"
        return session.run(flat, track=False)[0].value

    whole = code(Spread(dp=2)).replace("global_batch=8", "global_batch=16")
    assert weights(code(Spread(dp=2), parts=2)) == pytest.approx(weights(whole), abs=1e-5)


@pytest.mark.slow
def test_the_best_is_measured_on_the_running_ranks(session: Session) -> None:
    import torch

    from nbdist.client.notebook.advise_command import advise

    make = functools.partial(torch.nn.Linear, 512, 512)
    given = {"model": "make", "batch": "batch", "global_batch": 64, "samples": 0, "run": True}
    asked = Namespace(**given, **dict.fromkeys(("loss", "optimizer", "on", "prices")))
    found = advise(asked, {"make": make, "batch": torch.empty(64, 512, device="meta")})
    assert found.best is not None
    assert found.measured_s is not None
    assert "A step of the best was measured here: " in str(found)
    assert not session.run("'_nbdist_advised' in globals()", track=False)[0].value
