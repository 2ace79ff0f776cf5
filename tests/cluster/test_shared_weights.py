"""A weight of the first stage and of the last trains under pp as in one process, and is one."""

from typing import Any

import pytest

from nbdist import Session
from tests.cluster.conftest import LONGEST_S

MAKE = """
class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.token = torch.nn.Embedding(32, 16)
        self.blocks = torch.nn.ModuleList(torch.nn.Sequential(
            torch.nn.LayerNorm(16), torch.nn.Linear(16, 16), torch.nn.Tanh()) for _ in range(4))
        self.head = torch.nn.Linear(16, 32, bias=False)
        self.head.weight = self.token.weight
    def forward(self, ids):
        x = self.token(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)
ids = torch.arange(64).view(8, 8) * 7 % 32
def make(text, seed=0):
    torch.manual_seed(seed)
    layout = nbdist.parallelize(Tied(), text)
    return layout, layout.optimizer(torch.optim.AdamW, lr=0.01)
def train(layout, optimizer, steps):
    part, parts = layout.shape.data_part(rank)
    x = ids.chunk(parts)[part]
    for step in range(steps):
        layout.step(x, x.roll(-1, 1), lambda out, y: torch.nn.functional.cross_entropy(
            out.flatten(0, 1), y.flatten()))
        norm = layout.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return float(norm)
def weights(layout):
    return {name: one.tolist() for name, one in layout.state_dict().items()}
"""


def run(session: Session, code: str, **params: object) -> Any:
    return session.run(code, params=params, timeout_s=4 * LONGEST_S)[0].value


def flat(numbers: Any) -> list[float]:
    if not isinstance(numbers, list):
        return [numbers]
    return [one for row in numbers for one in flat(row)]


@pytest.fixture
def trained(session: Session) -> Session:
    session.run(MAKE)
    session.run("layout, optimizer = make('pp=2')\nnorm = train(layout, optimizer, 3)")
    return session


@pytest.mark.slow
def test_weights_and_norms_are_those_of_another_layout(trained: Session) -> None:
    told = "(weights(layout), norm)"
    staged, staged_norm = run(trained, told)
    run(trained, "layout, optimizer = make('ddp')\nnorm = train(layout, optimizer, 3)")
    whole, norm = run(trained, told)
    assert staged_norm == pytest.approx(norm, rel=1e-5)
    assert list(staged) == list(whole)
    for name, numbers in whole.items():
        assert flat(staged[name]) == pytest.approx(flat(numbers), abs=2e-5)


@pytest.mark.slow
def test_what_is_sent_for_it_is_in_the_bytes_that_explain_tells(trained: Session) -> None:
    run(trained, "norm = train(layout, optimizer, 8)")
    assert trained.expect("bytes 1 % of explain")
    explained = str(run(trained, "str(layout.explain())"))
    assert "token.weight: a copy on each of its stages" in explained


@pytest.mark.parametrize(
    "other", ["zero3", *(pytest.param(text, marks=pytest.mark.slow) for text in ("ddp", "pp=2"))]
)
def test_a_checkpoint_of_it_goes_on_under_another_layout(trained: Session, other: str) -> None:
    run(trained, "nbdist.save('tied')")
    expected = run(trained, "train(layout, optimizer, 2)")
    run(trained, "layout, optimizer = make(other, seed=3)\nnbdist.restore('tied')", other=other)
    assert run(trained, "train(layout, optimizer, 2)") == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_it_is_proven_with_the_optimizer_that_trains_it(trained: Session) -> None:
    proof = run(
        trained,
        "str(layout.verify((ids, ids), lambda out, y: torch.nn.functional.cross_entropy(\n"
        "    out.flatten(0, 1), y.flatten()), optimizer=optimizer).verdict)",
    )
    assert str(proof).startswith("equal within round-off over 3 steps, with AdamW")
