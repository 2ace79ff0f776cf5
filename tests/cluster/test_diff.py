"""`%dist diff`: the first step, rank, module and tensor at which two runs, or two layouts, part."""

import json
import stat
from pathlib import Path

import pytest

import nbdist
from nbdist import Session
from nbdist.client.metrics.numerics.distances import first_beyond
from nbdist.client.metrics.numerics.runs import RunDiff
from nbdist.client.tracking.past.recorded import diff
from nbdist.client.tracking.past.runs import runs
from tests.cluster.conftest import LONGEST_S, Kernel

# Six steps of 4 samples on each of two ranks; `change` says what one of the runs does otherwise.
TRAIN = """
change = globals().get("change", "")
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
        self.drop = torch.nn.Dropout(0.25)
    def forward(self, x):
        out = self.down(torch.relu(self.up(x)))
        if change == "code" and step == 3:
            out = out * 1.01
        return x + self.drop(out)
torch.manual_seed(1 if change == "seed" else 0)
class Net(torch.nn.Sequential):
    def forward(self, x):
        return super().forward(x)
model = Net(Block(), torch.nn.BatchNorm1d(8), Block(), torch.nn.Linear(8, 2))
layout = nbdist.parallelize(model, globals().get("text", "ddp"))
kind = torch.optim.Adam if change == "optimizer" else torch.optim.AdamW
optimizer = kind(model.parameters(), lr=0.01, weight_decay=0.1)
torch.manual_seed(rank)
def loss_fn(out, y):
    return (out - y).square().mean() * (1.01 if change == "loss" and step == 2 else 1)
for step in range(1, 7):
    numbers = torch.Generator().manual_seed(10 * step + layout.shape.data_part(rank)[0])
    x, y = torch.randn(4, 8, generator=numbers), torch.randn(4, 2, generator=numbers)
    if change == "sample" and step == 5 and rank == 1:
        x[2, 3] += 1
    if change == "draw" and step == 4 and rank == 0:
        torch.rand(1)
    if change == "rate" and step == 4:
        optimizer.param_groups[0]["lr"] = 0.02
    if change == "weights" and step == 3:
        with torch.no_grad():
            model[3].bias.add_(0.5)
    layout.step({"x": x}, y, loss_fn)
    if change == "clip" and step == 2:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
"""
# What a change makes differ first: the step, what, of which module or tensor, and on which ranks.
FOUND = {
    "seed": (1, "weight", "0.up.weight", [0, 1]),
    "sample": (5, "input", "the model", [1]),
    "draw": (4, "output", "0.drop", [0]),
    "code": (3, "output", "0.drop", [0, 1]),
    "loss": (2, "loss", "", [0, 1]),
    "clip": (2, "gradient", "3.bias", [0, 1]),
    "rate": (4, "options", "group 0", [0, 1]),
    "optimizer": (1, "options", "group 0", [0, 1]),
    "weights": (3, "weight", "3.bias", [0, 1]),
}


def train(
    session: Session, change: str = "", text: str = "ddp", *, keep: bool = True, name: str = "other"
) -> None:
    params = {"change": change, "text": text}
    session.run(TRAIN, params=params, keep=keep, run_name=name, timeout_s=4 * LONGEST_S)


def of_runs(one: str, other: str) -> RunDiff:
    return diff(Path(".nbdist").absolute(), None, one, other)


@pytest.fixture
def sound(session: Session) -> str:
    """The name of a run without any change."""
    if not any(row.name == "sound" for row in runs(Path(".nbdist").absolute())):
        train(session, name="sound")
    return "sound"


@pytest.mark.slow
def test_a_run_that_is_made_again_is_equal_bit_for_bit(session: Session, sound: str) -> None:
    train(session)
    found = of_runs(sound, "other")
    assert found.ok
    assert found.sentences == ["equal bit for bit in all of the 6 steps."]
    assert {one.what for one in found.distances} >= {"weight", "output", "gradient", "new weight"}


@pytest.mark.parametrize("change", FOUND)
def test_the_first_place_at_which_two_runs_part_is_named(
    session: Session, sound: str, change: str
) -> None:
    train(session, change)
    found = of_runs(sound, "other")
    at = first_beyond(found.distances)
    assert at is not None
    first = found.distances[at]
    key = (first.step, first.what, first.name)
    ranks = [d.rank for d in found.distances if (d.step, d.what, d.name) == key and d.is_beyond]
    assert (*key, ranks) == FOUND[change]
    assert all(one.by == 0 for one in found.distances[:at])
    assert "All before it is equal bit for bit." in found.sentences
    told = "Their random numbers differ from step 4 on." in found.sentences
    assert told == (change == "draw")


def test_what_is_written_down_is_its_owners_alone_and_holds_no_sample(session: Session) -> None:
    train(session)
    folder = max(Path(".nbdist/numerics").iterdir())
    assert sorted(file.name for file in folder.iterdir()) == ["rank0.jsonl", "rank1.jsonl"]
    modes = [stat.S_IMODE(one.stat().st_mode) for one in (folder.parent, folder, *folder.iterdir())]
    assert modes == [0o700, 0o700, 0o600, 0o600]
    lines = (folder / "rank0.jsonl").read_text().splitlines()
    (given,) = [e for e in json.loads(lines[1])["entries"] if e[0] == "input"]
    assert given[2] == "float32 (4, 8)"
    assert len(given[3]) == 17  # of 32 numbers


def test_a_run_that_has_written_nothing_down_is_refused(session: Session, sound: str) -> None:
    train(session, keep=False, name="forgetful")
    with pytest.raises(nbdist.UsageError, match=r"steps of forgetful .* not known") as refused:
        of_runs(sound, "forgetful")
    assert "%%distributed --keep" in refused.value.do
    with pytest.raises(nbdist.UsageError, match="sound and sound are one run"):
        of_runs(sound, sound)


def test_hooks_are_gone_when_the_cell_is_over(session: Session) -> None:
    train(session)
    session.run(
        "from torch.nn.modules import module\n"
        "assert not module._global_forward_hooks\n"
        "assert not module._global_forward_pre_hooks"
    )


def test_a_tensor_of_a_kind_of_its_own_does_not_stop_the_training(session: Session) -> None:
    session.run(
        "class Odd(torch.nn.Module):\n"
        "    def forward(self, x): return torch.nested.as_nested_tensor([x[:2], x[2:]])\n"
        "class Even(torch.nn.Module):\n"
        "    def forward(self, x): return torch.cat(x.unbind())\n"
        "odd = torch.nn.Sequential(torch.nn.Linear(8, 8), Odd(), Even())\n"
        "opt = torch.optim.SGD(odd.parameters(), lr=0.1)\n"
        "for step in range(3):\n"
        "    odd(torch.ones(4, 8)).sum().backward()\n"
        "    opt.step()\n"
        "assert opt.param_groups",
        keep=True,
        run_name="odd",
        timeout_s=2 * LONGEST_S,
    )
    with pytest.raises(nbdist.UsageError, match="have computed is not known"):
        of_runs("odd", "sound")


# ---- Layouts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    ["zero1", "tp=2", *(pytest.param(text, marks=pytest.mark.slow) for text in ("zero3", "pp=2"))],
)
def test_layouts_that_compute_the_same_do_not_part(session: Session, other: str) -> None:
    train(session, text="ddp")
    found = session.diff("ddp", other)
    assert found.one.first is found.other.first is None, str(found)
    assert {d.what for d in found.other.distances} >= {"output", "gradient", "loss"}


@pytest.mark.slow
def test_a_layer_that_is_not_what_it_was_is_named_with_its_ranks(session: Session) -> None:
    train(session, text="ddp")
    session.run("if rank == 1: model[2].down.register_forward_hook(lambda m, x, out: out * 1.01)")
    found = session.diff("ddp", "zero3")
    first = found.one.first
    assert first is not None
    assert (first.what, first.name, found.one.ranks) == ("output", "2.down", (1,))
    assert found.other.first is None
    assert "ddp: parts at the output of 2.down on rank 1, by " in str(found)


@pytest.mark.slow
def test_a_backward_alone_that_is_wrong_is_told_from_its_forward(session: Session) -> None:
    train(session, text="zero3")
    session.run("model[2].register_full_backward_hook(lambda m, given, got: (2 * given[0],))")
    found = session.diff("zero3", "ddp")
    first = found.one.first
    assert first is not None
    assert first.what == "gradient"
    assert all(one.share <= 1 for one in found.one.distances if one.what == "output")
    assert first.name.startswith("1.")  # what is behind the block, seen from the loss


@pytest.mark.slow
def test_a_loss_that_depends_on_how_the_batch_is_cut_is_said(session: Session) -> None:
    train(session, text="ddp")
    session.run(
        "def masked(out, y):\n"
        "    keep = (y[:, :1] > 0).float() + 0.01\n"
        "    return ((out - y).square() * keep).sum() / keep.sum()\n"
        "y[:, 0] = 1.0 if rank else -1.0\n"
        "layout.step(x, y, masked)\n"
        "optimizer.zero_grad()"
    )
    found = session.diff("ddp", "tp=2")
    assert found.split_differs
    assert not found.ok
    assert "the batch is cut otherwise" in str(found)


@pytest.mark.slow
def test_the_live_layout_trains_on_as_without_a_diff(session: Session) -> None:
    more = "\nfor step in range(7, 9):\n    layout.step(x, y, loss_fn)\n    optimizer.step()\n"
    more += "[p.tolist() for p in model.parameters()]"
    train(session, text="ddp")
    expected = str(session.run(more, params={"change": ""}))
    train(session, text="ddp")
    session.diff("zero3", "tp=2")
    assert str(session.run(more, params={"change": ""})) == expected
    assert session.verify().startswith("ddp against one process")


def test_what_cannot_be_compared_is_refused_on_all_ranks(session: Session) -> None:
    train(session, text="ddp")
    with pytest.raises(nbdist.LayoutError, match="needs 3 ranks"):
        session.diff("ddp", "tp=3")
    with pytest.raises(nbdist.LayoutError, match="are one layout on 2 ranks"):
        session.diff("zero3", "fsdp=2")


def test_in_a_notebook_it_is_a_line_with_a_picture(kernel: Kernel) -> None:
    kernel.run("%load_ext nbdist")
    kernel.run("%dist start -n 2 --device cpu")
    early = kernel.run("%dist diff ddp zero3").error
    assert early is not None
    assert "There is no layout on the ranks." in early[1]
    kernel.cell(TRAIN, "--keep")
    kernel.cell(f"change = 'sample'\n{TRAIN}", "--keep")
    ran = kernel.run("%dist diff 2 1")
    assert "they part at step 5, on rank 1, at the input of the model" in ran.text
    assert any("image/png" in output.get("data", {}) for output in ran.outputs)
    refused = kernel.run("%dist diff ddp 1").error
    assert refused is not None
    assert "ddp is a layout, and 1 is none." in refused[1]
