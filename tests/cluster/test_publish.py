"""From a notebook's own class, trained in shards, to a version in MLflow's registry."""

import json

import pytest

from tests.cluster.conftest import Kernel
from tests.cluster.test_sweep import when_sent

TRAIN = """
class Own(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)
    def forward(self, x):
        return self.linear(x).relu()

layout = nbdist.parallelize(lambda: Own(), "zero3")
opt = torch.optim.SGD(layout.model.parameters(), lr=0.1)
for step in range(3):
    layout.step(torch.ones(2, 4), torch.ones(2, 3), torch.nn.functional.mse_loss)
    opt.step(); opt.zero_grad()
"""
# In a process of its own, as its users have it: without the class.
REGISTRY = """
import json, mlflow, numpy
client = mlflow.MlflowClient("sqlite:///.nbdist/mlflow.db")
version = client.get_model_version_by_alias("own", "best")
model = mlflow.pyfunc.load_model(version.source)
print(json.dumps([str(version.version), model.predict(numpy.ones((5, 4), "float32")).tolist()]))
"""


@pytest.mark.slow  # tracking/test_publish.py publishes, too
def test_a_class_of_the_notebook_is_trained_in_shards_and_published(notebook: Kernel) -> None:
    ran = notebook.cell(TRAIN + "nbdist.publish(layout, 'own', alias='best')", "--run made")
    assert ran.error is None, ran.error
    assert "becomes a new version: models:/own@best" in ran.text
    assert "Published with it, once it is in MLflow: models:/own@best." in ran.text
    expected = notebook.cell(
        "state = layout.state_dict()\n"
        "if rank == 0:\n"
        "    plain = Own(); plain.load_state_dict(state)\n"
        "    print('answer', plain(torch.ones(1, 4)).flatten().tolist())",
        "--no-track",
    )
    ran = notebook.cell("nbdist.publish(layout, 'own', alias='best')", "--run again")
    assert ran.error is None, ran.error
    assert "Published with it" in ran.text, "a cell that publishes alone has a run, too"
    assert any("again" in line for line in when_sent(notebook))
    found = notebook.run(
        "import subprocess, sys\n"
        f"made = subprocess.run([sys.executable, '-c', {REGISTRY!r}], stdout=subprocess.PIPE)\n"
        "print(made.stdout.decode())",
        timeout_s=200,
    )
    assert found.error is None, found.error
    version, answer = json.loads(found.text.splitlines()[-1])
    assert version == "2"
    plain = json.loads(expected.text.partition("answer ")[2].splitlines()[0])
    for row in answer:
        assert row == pytest.approx(plain, abs=1e-5)


def test_a_cell_that_is_not_tracked_publishes_nothing_and_says_so(notebook: Kernel) -> None:
    ran = notebook.cell(
        "nbdist.publish(torch.nn.Linear(2, 2), 'own', example=torch.ones(3, 2))", "--no-track"
    )
    assert ran.error is not None
    assert "PublishError: This cell is not tracked" in ran.error[1]
    assert "run the cell without --no-track" in ran.error[1]
