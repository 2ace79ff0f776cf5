"""Rules on real ranks: their examples, and what each of their states does in a notebook."""

from collections.abc import Iterator

import pytest

import nbdist
from nbdist.client.metrics.checks.rules import all_rules
from tests.cluster.conftest import Kernel

RULES = {rule.name: rule for rule in all_rules()}
FORGET = (
    "model = layout = optimizer = net = block = scaler = sampler = loss = p = x = None\n"
    "schedule = data = test = half = None\n"
    "import gc; gc.collect()\n"
    "torch.set_default_dtype(torch.float32)"
)
SAYS = "Each rank trains a model of its own"
ALONE = """
torch.manual_seed(0)
kept, model = 40 + rank, torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(64, 4))
loader = nbdist.loader(data, global_batch=8)
for epoch in range(epochs):
    for (x,) in loader:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
# Each sample is seen once, by one rank.
DROPOUT = """
import pathlib, time
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(800, 4), torch.arange(800))
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout())
nbdist.parallelize(model, "ddp")
torch.manual_seed(1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
seen = []
def gathered(value):
    dist.all_gather_object(values := [None] * world_size, value)
    return values
"""
# Ranks wait, once, after step 5, of which the rule is broken, until they are interrupted.
UNTIL_ENDED = """
for x, samples in nbdist.loader(data, global_batch=8):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    seen.append(samples.tolist())
    ended = pathlib.Path(f"ended-{rank}")
    if len(seen) == 5 and not ended.exists():
        ended.touch()
        while True:
            time.sleep(0.01)
"""
TWICE = "--no-track -p epochs=2"
FOR_EVER = "--no-track -p epochs=1_000_000_000"


@pytest.fixture
def example(session: nbdist.Session) -> Iterator[nbdist.Session]:
    """A session whose ranks hold no models, before and after."""
    session.run(FORGET, track=False)
    yield session
    session.run(FORGET, track=False)


@pytest.mark.parametrize("name", RULES)
def test_the_example_of_a_rule_makes_its_mistake(example: nbdist.Session, name: str) -> None:
    example.run(RULES[name].example, track=False)
    assert name in example.checks().found


@pytest.mark.parametrize("name", RULES)
def test_of_the_mended_example_no_rule_says_anything(example: nbdist.Session, name: str) -> None:
    example.run(RULES[name].mended, track=False)
    assert example.checks().found == {}


def test_what_the_rules_cost_is_known_once_a_cell_has_trained(example: nbdist.Session) -> None:
    example.run(RULES["model-per-rank"].mended, track=False)
    cost = example.checks().cost
    assert cost is not None
    assert cost.steps == 8
    assert cost.notebook_us > 0


@pytest.fixture
def reader(notebook: Kernel) -> Iterator[Kernel]:
    yield notebook
    assert notebook.run('%config NBDist.checks = "warn"').error is None
    notebook.cell(FORGET, "--no-track")


def test_a_rule_that_warns_says_it_and_the_cell_ends_by_itself(reader: Kernel) -> None:
    ran = reader.cell(ALONE, TWICE)
    assert ran.error is None
    assert ran.text.count(SAYS) == 1


def test_a_rule_that_raises_ends_the_cell_on_all_ranks_with_its_sentence_and_nothing_is_lost(
    reader: Kernel,
) -> None:
    assert reader.run('%config NBDist.checks = {"model-per-rank": "raise"}').error is None
    ran = reader.cell(ALONE, FOR_EVER)
    assert ran.error is not None
    name, value, told = ran.error
    assert name == "CheckError"
    assert value.startswith(SAYS)
    assert "the rule model-per-rank is set to raise, and the cell was interrupted." in told
    assert "--ignore model-per-rank" in told
    assert SAYS not in ran.text  # the error says it
    assert reader.cell("kept", "--no-track").text.split("Out: ")[1:] == ["40\nrank 1 │ ", "41"]
    assert "2.0" in reader.cell("t = torch.ones(1); dist.all_reduce(t); t.item()").text


@pytest.mark.slow
def test_a_rule_that_raises_after_the_last_step_ends_the_cell_with_an_error_too(
    reader: Kernel,
) -> None:
    assert reader.run('%config NBDist.checks = "raise"').error is None
    ran = reader.cell(ALONE, TWICE)
    assert ran.error is not None
    assert ran.error[1].startswith(SAYS)


@pytest.mark.slow
def test_a_cell_that_a_rule_has_ended_goes_on_where_it_was_once_the_rule_only_warns(
    reader: Kernel,
) -> None:
    assert reader.run('%config NBDist.checks = {"equal-dropout": "raise"}').error is None
    assert reader.cell(DROPOUT, "--no-track").error is None
    ran = reader.cell(UNTIL_ENDED, "--no-track")
    assert ran.error is not None
    assert ran.error[0] == "CheckError"
    assert "ranks 0-1 │ Out: 5" in reader.cell("len(seen)", "--no-track").text
    assert reader.run('%config NBDist.checks = "warn"').error is None
    again = reader.run("%dist retry")
    assert again.error is None, again.error
    whole = "sorted(sum(sum(gathered(seen), []), [])) == list(range(800))"
    assert "ranks 0-1 │ Out: True" in reader.cell(whole).text


@pytest.mark.slow
def test_a_cell_that_ignores_a_rule_is_ended_by_the_others_alone(reader: Kernel) -> None:
    assert reader.run('%config NBDist.checks = "raise"').error is None
    ran = reader.cell(ALONE, f"{TWICE} --ignore model-per-rank")
    assert ran.error is None
    assert SAYS not in ran.text
    listed = reader.run("%dist checks").text
    assert "ignored" in next(line for line in listed.splitlines() if "model-per-rank" in line)


@pytest.mark.slow
def test_a_rule_that_is_off_says_nothing(reader: Kernel) -> None:
    assert reader.run('%config NBDist.checks = {"model-per-rank": "off"}').error is None
    ran = reader.cell(ALONE, TWICE)
    assert ran.error is None
    assert SAYS not in ran.text


def test_checks_lists_all_rules_and_shows_the_page_of_one(reader: Kernel) -> None:
    listed = reader.run("%dist checks").text
    assert all(f"\n{name} " in listed for name in RULES)
    shown = reader.run("%dist checks same-samples").text
    assert RULES["same-samples"].example in shown
    wrong = reader.run("%dist checks same-sample")
    assert wrong.error is not None
    assert "did you mean same-samples?" in wrong.error[1]


CHANGED = "torch's default dtype is bfloat16, and was float32"
MASKED = """
torch.manual_seed(0)
model = torch.nn.Linear(4, 3)
layout = nbdist.parallelize(model, "ddp")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + rank)
for step in range(12):
    x, y = torch.randn(6, 4), torch.randint(3, (6,))
    y[6 if rank else 2 :] = -100
    layout.step(x, y, torch.nn.functional.cross_entropy{weight})
    optimizer.step()
    optimizer.zero_grad()
"""


def test_what_a_script_leaves_changed_is_said_though_a_cell_that_says_so_means_it(
    reader: Kernel,
) -> None:
    (reader.folder / "to_half.py").write_text(
        "import torch\ntorch.set_default_dtype(torch.bfloat16)\n"
    )
    assert CHANGED in reader.run("%dist run to_half.py --no-track").text
    assert "default dtype" not in reader.cell("torch.set_default_dtype(torch.float32)").text


def test_an_error_in_the_midst_of_a_librarys_function_leaves_its_dtype_and_that_is_said(
    reader: Kernel,
) -> None:
    (reader.folder / "halves.py").write_text(
        "import torch\n"
        "def load():\n"
        "    torch.set_default_dtype(torch.bfloat16)\n"
        "    raise OSError('no weights')\n"
    )
    ran = reader.cell("import halves\nhalves.load()", "--no-track")
    assert ran.error is not None
    assert CHANGED in ran.text


def test_a_masked_mean_is_weighed_by_what_is_kept_or_said_to_be_not(
    example: nbdist.Session,
) -> None:
    example.run(MASKED.format(weight=""), track=False)
    assert list(example.checks().found) == ["unequal-means"]
    said = example.checks().found["unequal-means"]
    assert "an element of rank 0 counts 3.00 times as much as one of rank 1." in said
    example.run(MASKED.format(weight=", weight=(y != -100)"), track=False)
    assert example.checks().found == {}
