"""An input that a layout has to ask for: its advice is a line of the user's own loader."""

import re

import nbdist
from tests.cluster.test_faults import fail

MAKE = """
class Odd(torch.nn.Module):
    \"\"\"Takes two tensors, and nothing tells what they are.\"\"\"
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(12, 16), torch.nn.Linear(16, 12)
    def forward(self, sound, scale):
        return self.down(self.up(sound[:, :3].flatten(1) * scale).relu())
def sample(i):
    return {"sound": torch.full((5, 4), float(i)), "scale": torch.ones(1), "target": i}
def targets(loader):
    return [batch["target"].tolist() for batch in loader]
data = [sample(i) for i in range(16)]
train = nbdist.loader(data, global_batch=4, seed=3)
model, layout = Odd(), "tp=2"
"""
WITHOUT = "targets(nbdist.loader(data, global_batch=4, seed=3))"


def test_the_line_that_asks_for_an_example_can_be_run_and_moves_neither_loader_nor_random_numbers(
    session: nbdist.Session,
) -> None:
    session.run(MAKE, track=False)
    told = fail(session, "nbdist.parallelize(model, layout)")
    found = re.search(r"(nbdist\.parallelize\(model, layout, .*\)), the first batch", told)
    assert found is not None, told
    line = found.group(1)
    assert line.endswith("TensorParallel(example=next(iter(train))))")
    ran = session.run(
        # tp itself lets its ranks draw the same numbers: the look alone is what draws none.
        "before = torch.get_rng_state()\nnext(iter(train))\n"
        f"same = torch.equal(before, torch.get_rng_state())\ngiven = {line}\n"
        "same, given.shape.tp, targets(train)",
        track=False,
    )
    expected = session.run(f"model = layout = train = None\n{WITHOUT}", track=False).value_list
    assert [targets for _, _, targets in ran.value_list] == expected
    assert [(same, tp) for same, tp, _ in ran.value_list] == [(True, 2)] * 2


def test_of_two_loaders_none_is_named(session: nbdist.Session) -> None:
    session.run(f"{MAKE}\nother = torch.utils.data.DataLoader(data)", track=False)
    told = fail(session, "nbdist.parallelize(model, layout)")
    assert "TensorParallel(example=batch)), a small batch as the model is called with" in told
    session.run("model = layout = train = other = None", track=False)
