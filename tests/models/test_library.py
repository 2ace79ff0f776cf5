"""Models of libraries, trained soundly on two ranks: no rule on silent mistakes speaks."""

from importlib.util import find_spec

import pytest

import nbdist
from tests.models.conftest import Said
from tests.models.library import MODELS

STEPS = 12
LAYOUTS = ("ddp", "zero3")
TRAIN = """
from tests.models.library import MODELS
case = MODELS[{name!r}]
torch.manual_seed(0)
data, model = nbdist.loader(Named(case.samples(48)), global_batch=8), case.make()
{spread}
torch.manual_seed(1 + rank)  # for dropout
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses = []
for epoch in range(2):
    for batch in data:
        loss = case.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
sum(losses[-4:]) / 4
"""
NAMED = """
class Named(torch.utils.data.Dataset):
    def __init__(self, samples): self.samples = samples
    def __len__(self): return len(self.samples["x"])
    def __getitem__(self, i): return {name: of_all[i] for name, of_all in self.samples.items()}
"""


def code(name: str, spread: str) -> str:
    return NAMED + TRAIN.format(name=name, spread=spread)


pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]  # some two minutes, all together


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_of_a_library_model_that_is_trained_soundly_no_rule_says_anything(
    session: nbdist.Session, said: Said, name: str, layout: str
) -> None:
    if find_spec(MODELS[name].library) is None:
        pytest.skip(f"{MODELS[name].library} is missing: pip install -c constraints.txt '.[test]'")
    assert said(code(name, f"nbdist.parallelize(model, {layout!r})")) == {}
    cost = session.checks().cost
    assert cost is not None
    assert cost.steps == STEPS


@pytest.mark.parametrize("name", ["mlp", "lstm", "decoder"])
def test_of_the_same_cells_with_a_mistake_in_them_the_rule_on_it_speaks(
    said: Said, name: str
) -> None:
    assert "model-per-rank" in said(code(name, ""))
