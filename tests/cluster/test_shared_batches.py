"""Batches are shared out by one loader, for the model that is trained; else it is said."""

import pytest

from tests.cluster.conftest import Kernel

PIPELINE = """
big = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
lay = nbdist.parallelize(big, "pp=2")
"""
TRAIN = """
data = torch.utils.data.TensorDataset(torch.ones(16, 4), torch.arange(16))
model = {model}
opt, seen = torch.optim.SGD(model.parameters(), lr=0.1), []
for x, i in nbdist.loader(data, global_batch=8, shuffle=True):
    model(x).pow(2).mean().backward(); opt.step(); opt.zero_grad()
    seen += i.tolist()
"""
SAID = "nbdist.loader has given several ranks the same samples, as the newest layout (pp=2 of "


@pytest.mark.parametrize(
    ("own", "samples"),
    [
        ("torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))", 16),
        ("torch.nn.Linear(4, 2); nbdist.parallelize(model, 'ddp')", 8),
    ],
)
def test_a_model_beside_a_pipeline_that_gets_its_samples_is_named(
    notebook: Kernel, own: str, samples: int
) -> None:
    notebook.cell(PIPELINE)
    ran = notebook.cell(TRAIN.format(model=own))
    seen = notebook.cell("len(seen)", "-r 0").text
    notebook.cell("_ = globals().pop('big', None), globals().pop('lay', None)")
    assert ran.error is None, ran.error
    assert str(samples) in seen
    assert (SAID in ran.text) == (samples == 16), ran.text


@pytest.mark.parametrize(
    "differs",
    [
        "seed=rank",
        *(
            pytest.param(text, marks=pytest.mark.slow)
            for text in ("shuffle=rank == 0", "global_batch=8 + 2 * rank")
        ),
    ],
)
def test_a_loader_that_is_another_one_on_each_rank_is_named(notebook: Kernel, differs: str) -> None:
    options = {"global_batch": "8", "shuffle": "True", "seed": "3"}
    name, _, value = differs.partition("=")
    options[name] = value
    given = ", ".join(f"{name}={value}" for name, value in options.items())
    own = "torch.nn.Linear(4, 2)"
    cell = TRAIN.format(model=own).replace("global_batch=8, shuffle=True", given)
    ran = notebook.cell(cell, "--no-track")
    assert "is another one on each rank: its seed, shuffle, global_batch" in ran.text, ran.text
    assert "is another one" not in notebook.cell(TRAIN.format(model=own), "--no-track").text
