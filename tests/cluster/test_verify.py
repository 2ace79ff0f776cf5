"""`%dist verify` in a real kernel: the proof once, as text, and in words where there is none."""

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
    assert "Inputs were guessed" in guessed.text
    assert notebook.cell("layout.step(x, y, F.cross_entropy)").error is None
    for handle in ("layout", "net"):
        proven = notebook.run(f"%dist verify {handle}")
        assert proven.error is None
        assert "equal bit for bit over 3 steps" in proven.text
        assert "those of the last layout.step" in proven.text
    same = notebook.cell("print(held() == before)")
    assert "True" in same.text


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
