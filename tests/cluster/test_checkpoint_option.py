"""`%%distributed --checkpoint every=N --retry K`: a cell goes on after its shards were lost."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import nbdist
from nbdist import RankError, Session, UsageError
from nbdist.client.tracking.past.runs import runs
from tests.cluster.conftest import Kernel


@pytest.fixture(autouse=True)
def _new_ranks(session: Session) -> None:
    """Begin with ranks that hold nothing: what other tests have trained is no part of a save."""
    session.restart()


MAKE = """
import os, pathlib, signal
FLAG = pathlib.Path({flag!r})
class Seen(list):
    def state_dict(self): return {{"seen": list(self)}}
    def load_state_dict(self, state): self[:] = state["seen"]
def train():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 2))
    nbdist.parallelize(model, "zero3")
    torch.manual_seed(rank)
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(opt, 5, 0.5)
    data = torch.randn(64, 4, generator=torch.Generator().manual_seed(5))
    data[:, 0] = torch.arange(64) / 64
    loader, seen = nbdist.loader(data, global_batch=8, seed=3), Seen()
    nbdist.keep(seen=seen)
    for epoch in range(4):
        for x in loader:
            model(x).pow(2).mean().backward()
            opt.step(); schedule.step(); opt.zero_grad()
            seen.append(sorted((x[:, 0] * 64).round().int().tolist()))
            if rank == 1 and len(seen) == 21 and not FLAG.exists():
                FLAG.touch()
                os.kill(os.getpid(), signal.SIGKILL)
    whole = torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()])
    nbdist.keep(seen=None)
    return whole.tolist(), list(seen), schedule.get_last_lr()
"""


@pytest.mark.slow
def test_a_cell_whose_shards_died_with_a_rank_ends_as_without_the_fault(
    session: Session, tmp_path: Path
) -> None:
    flag = tmp_path / "has-died"
    session.run(MAKE.format(flag=str(flag)))
    flag.touch()
    unbroken = session.run("train()", track=False).value_list
    flag.unlink()
    resumed = session.run("train()", track=False, retry=1, checkpoint=5)
    assert flag.exists()
    assert session._cluster.faults() >= 1, "the interval that is advised follows from it"
    assert "Restored step " in resumed[0].text
    assert resumed.value_list == unbroken
    steps = zip(unbroken[0][1], unbroken[1][1], strict=True)
    assert sorted(sample for mine, other in steps for sample in mine + other) == sorted(
        4 * list(range(64))
    )


@pytest.mark.slow
def test_steps_that_are_made_again_after_a_checkpoint_count_once(
    notebook: Kernel, tmp_path: Path
) -> None:
    notebook.cell(MAKE.format(flag=str(tmp_path / "has-died")))
    ran = notebook.cell("_ = train()", "--retry 1 --checkpoint every=5")
    assert "Restored step " in ran.text
    assert runs(notebook.folder / ".nbdist")[0].steps == 32


@pytest.mark.slow
def test_a_cell_that_fails_before_its_first_checkpoint_takes_no_older_one(
    session: Session, tmp_path: Path
) -> None:
    flag = tmp_path / "has-died"
    session.run(MAKE.format(flag=str(flag)))
    resumed = session.run("train()", track=False, retry=1, checkpoint=1000)
    assert flag.exists()
    assert "Restored" not in resumed[0].text
    assert len(resumed.value_list[0][1]) == 32


@pytest.mark.parametrize("is_there", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_cell_that_restores_from_elsewhere_does_not_miss_its_newest_checkpoint_unsaid(
    session: Session, tmp_path: Path, is_there: bool
) -> None:
    flag, other = tmp_path / "has-died", str(tmp_path / "other")
    call = f"    nbdist.restore({other!r}, missing_ok=True)\n    for epoch"
    session.run(MAKE.format(flag=str(flag)).replace("    for epoch", call))
    flag.touch()
    unbroken = session.run("train()", track=False).value_list
    if is_there:
        save = f"        nbdist.save({other!r}, wait=True); break\n    whole"
        session.run(MAKE.format(flag=str(flag)).replace("    whole", save, 1) + "train()")
        session.run(MAKE.format(flag=str(flag)).replace("    for epoch", call))
    flag.unlink()
    resumed = session.run("train()", track=False, retry=1, checkpoint=5)
    assert flag.exists()
    said = resumed[0].text
    assert ("is not used: the cell itself has restored an older one" in said) is is_there
    assert said.count("Restored step ") == 1
    assert (resumed.value_list == unbroken) is not is_there


def test_some_ranks_cannot_save_what_all_train(session: Session) -> None:
    with pytest.raises(UsageError, match="--checkpoint saves what all ranks train together"):
        session.run("1", "0", checkpoint=5)


BEFORE = """
import os, pathlib, signal
FLAG = pathlib.Path({flag!r})
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
nbdist.parallelize(model, "zero3")
opt = torch.optim.AdamW(model.parameters(), lr=0.01)
data = torch.randn(64, 4, generator=torch.Generator().manual_seed(5))
loader = nbdist.loader(data, global_batch=8, seed=3)
"""
TRAIN = """
for epoch in range(4):
    for step, x in enumerate(loader):
        model(x).pow(2).mean().backward()
        opt.step(); opt.zero_grad()
        if rank == 1 and epoch == 2 and step == 4 and not FLAG.exists():
            FLAG.touch()
            os.kill(os.getpid(), signal.SIGKILL)
torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()]).tolist()
"""


@pytest.mark.slow
def test_a_model_older_than_the_cell_gets_its_lost_shards_from_the_checkpoint(
    session: Session, tmp_path: Path
) -> None:
    flag = tmp_path / "has-died"
    flag.touch()
    session.run(BEFORE.format(flag=str(flag)))
    unbroken = session.run(TRAIN, track=False).value_list
    session.run(BEFORE.format(flag=str(flag)))
    flag.unlink()
    resumed = session.run(TRAIN, track=False, retry=1, checkpoint=5)
    assert flag.exists()
    assert "Restored step " in resumed[0].text
    assert resumed[0].text.count("is at sample") == 1, resumed[0].text
    assert resumed.value_list == unbroken


@pytest.mark.slow
def test_after_a_death_restore_makes_a_refused_model_whole(
    session: Session, tmp_path: Path
) -> None:
    flag = tmp_path / "has-died"
    flag.touch()
    session.run(BEFORE.format(flag=str(flag)))
    session.run(f"{TRAIN}\nnbdist.save({str(tmp_path / 'saved')!r}, wait=True)", track=False)
    whole = session.run(TRAIN.splitlines()[-1]).value_list
    with pytest.raises(RankError):
        session.run("if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()")
    with pytest.raises(RankError, match=r"nbdist\.restore\(\)"):
        session.run("model(data)")
    session.run(f"nbdist.restore({str(tmp_path / 'saved')!r})")
    assert session.run(TRAIN.splitlines()[-1]).value_list == whole


@pytest.mark.parametrize(
    ("layout", "by_itself"),
    [
        ("zero3", True),
        pytest.param("zero3", False, marks=pytest.mark.slow),
        pytest.param("tp=2", False, marks=pytest.mark.slow),
    ],
)
def test_what_is_advised_after_shards_were_lost_ends_as_without_the_fault(
    session: Session, tmp_path: Path, layout: str, by_itself: bool
) -> None:
    flag, folder = tmp_path / "has-died", str(tmp_path / "saved")
    flag.touch()
    before = BEFORE.replace('"zero3"', repr(layout)).replace("Linear(8, 2)", "Linear(8, 4)")
    train = TRAIN
    if not by_itself:
        train = TRAIN.replace(
            "opt.zero_grad()", f"opt.zero_grad()\n        nbdist.save({folder!r}, wait=True)"
        )
    session.run(before.format(flag=str(flag)))
    unbroken = session.run(train, track=False, checkpoint=5 * by_itself).value_list
    shutil.rmtree(folder, ignore_errors=True)
    session.run(before.format(flag=str(flag)))
    flag.unlink()
    with pytest.raises(RankError) as caught:
        session.run(train, track=False, checkpoint=5 * by_itself)
    assert flag.exists()
    if by_itself:
        assert caught.value.do.startswith("%dist retry runs the cell again, and its first loop")
    else:
        assert caught.value.do.startswith("nbdist.restore(), called as nbdist.save was")
        session.run(f"nbdist.restore({folder!r})")
    assert session.retry().value_list == unbroken


def test_a_cell_goes_on_from_its_checkpoint_when_all_ranks_have_died(
    session: Session, tmp_path: Path
) -> None:
    flag = tmp_path / "has-died"
    # Every rank dies once, and has a file of its own that tells so.
    whole = MAKE.replace("pathlib.Path({flag!r})", "pathlib.Path({flag!r} + str(rank))")
    whole = whole.replace("rank == 1 and ", "").format(flag=str(flag))
    for rank in range(2):
        (tmp_path / f"has-died{rank}").touch()
    unbroken = session.run(f"{whole}\ntrain()", track=False).value_list
    for rank in range(2):
        (tmp_path / f"has-died{rank}").unlink()
    resumed = session.run(f"{whole}\ntrain()", track=False, retry=1, checkpoint=5)
    assert (tmp_path / "has-died0").exists()
    assert "Restored step " in resumed[0].text
    assert resumed.value_list == unbroken


@pytest.mark.slow
def test_a_save_by_hand_and_one_by_itself_may_fall_on_the_same_step(
    session: Session, tmp_path: Path
) -> None:
    flag = tmp_path / "has-died"
    flag.touch()
    session.run(BEFORE.format(flag=str(flag)))
    by_hand = f"    nbdist.save({str(tmp_path / 'mine')!r})\n"
    cell = TRAIN.replace("torch.cat", f"{by_hand}torch.cat")
    session.run(cell, track=False, checkpoint=8)
    saved = sorted(path.name for path in (tmp_path / "mine").iterdir())
    assert saved == ["latest", "step-00000016", "step-00000024", "step-00000032"]


@pytest.mark.slow
def test_an_older_model_that_only_out_keeps_is_no_part_of_a_checkpoint(
    session: Session, tmp_path: Path
) -> None:
    flag = tmp_path / "has-died"
    flag.touch()
    folder = str(tmp_path / "saved")
    session.run(f"{BEFORE.format(flag=str(flag))}\n{TRAIN}\nOut['older'] = opt\nopt", track=False)
    session.run(f"{BEFORE.format(flag=str(flag))}\n{TRAIN}", track=False)
    session.run(f"nbdist.save({folder!r}, wait=True)\nmodel.eval()")
    with_forward = "with torch.no_grad(): model(data)\n"
    session.run(f"{with_forward}found = nbdist.restore({folder!r})\nOut.pop('older')")
    assert session.run("list(found.layouts)").value_list == [["Sequential"], ["Sequential"]]


ANYWHERE = """
import json, os, pathlib, signal
FOLDER = pathlib.Path({folder!r})
def train(layout="zero3", dying=None):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    nbdist.parallelize(model.double(), layout)
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = torch.randn(60, 4, generator=torch.Generator().manual_seed(5)).double()
    data[:, 0] = torch.arange(60) / 60
    loader = nbdist.loader(data, global_batch=6, seed=3)
    for epoch in range(4):
        for x in loader:
            model(x).pow(2).mean().backward()
            opt.step(); opt.zero_grad()
            step = int(opt.state[next(iter(opt.state))]["step"])
            with open(FOLDER / f"{{world_size}}-{{rank}}", "a") as lines:
                print(json.dumps([step, (x[:, 0] * 60).round().int().tolist()]), file=lines)
            if rank == dying and step == 17 and world_size == 3:
                os.kill(os.getpid(), signal.SIGKILL)
    return torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()]).tolist()
"""


@pytest.fixture
def three(session: Session, tmp_path: Path) -> Iterator[Session]:
    """A session of three ranks; new processes of a rank that is one of three die at once."""
    session.scale(3)
    session.run(ANYWHERE.format(folder=str(tmp_path)))
    native = session._cluster._engine_spec

    def spec(rank: int, n: int | None) -> dict[str, Any]:
        return native(rank, n) if n == 2 else {"rank": rank}

    session._cluster._engine_spec = spec
    yield session
    del session._cluster._engine_spec
    if session.broken:
        session.restart()
    session.scale(2)


def samples_by_step(folder: Path, ranks: int) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for rank in range(ranks):
        for line in (folder / f"{ranks}-{rank}").read_text().splitlines():
            step, samples = json.loads(line)
            found[step] = sorted([*found.get(step, []), *samples])
    return found


@pytest.mark.parametrize("dying", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_cell_goes_on_with_fewer_ranks_where_one_cannot_be_replaced(
    three: Session, tmp_path: Path, dying: int
) -> None:
    unbroken = three.run("train()", track=False)[0].value
    expected = samples_by_step(tmp_path, 3)
    done = three.run(f"train(dying={dying})", track=False, retry=1, checkpoint=5)
    assert list(done) == [0, 1]
    restored = re.search(r"Restored step (\d+) from .*, saved .* ago on 3 ranks", done[0].text)
    assert restored, done[0].text
    after = samples_by_step(tmp_path, 2)
    step = int(restored[1])
    epoch = (step - 1) // 10  # an epoch ends when the loop asks for more
    assert f"at sample {6 * step - 60 * epoch} of epoch {epoch}" in done[0].text
    assert sorted(after) == list(range(step + 1, 41))
    assert all(after[step] == expected[step] for step in after)
    assert done[0].value == pytest.approx(unbroken, abs=1e-12)
    assert done[1].value == done[0].value
    assert three.world_size == 2
    assert three.describe.startswith("2 ranks")


REPLICATED = """
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).double()
layout = nbdist.parallelize(model, "ddp")
opt = torch.optim.AdamW(model.parameters(), lr=0.01)
data = torch.randn(60, 4, generator=torch.Generator().manual_seed(5)).double()
loader = nbdist.loader(data, global_batch=6, seed=3)
"""
STEPS = """
import os, signal
seen = 0
for x in loader:
    model(x).pow(2).mean().backward()
    seen += 1
    if DIES and world_size == 3 and seen == 7:
        if rank == 2: os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1: raise ValueError("it has not made the step that rank 0 has made")
    opt.step(); opt.zero_grad()
torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
"""


@pytest.mark.slow
def test_what_replicas_hold_goes_on_from_memory_on_fewer_ranks(three: Session) -> None:
    three.run(REPLICATED)
    unbroken = three.run(STEPS, track=False, params={"DIES": False})[0].value
    three.run(REPLICATED)
    params = {"DIES": True}
    done = three.run(STEPS, track=False, params=params, retry=1, checkpoint=100)
    assert list(done) == [0, 1]
    assert done[0].value == done[1].value == pytest.approx(unbroken, abs=1e-12)


@pytest.mark.slow
def test_a_layout_that_fits_no_fewer_ranks_ends_with_both_reasons(three: Session) -> None:
    with pytest.raises(RankError) as caught:
        three.run("train('fsdp=3', dying=2)", track=False, retry=1, checkpoint=5)
    told = str(caught.value)
    assert "Rank 2 could not be replaced: Rank 2 ended while starting" in told
    assert "with fewer ranks: the cell's layouts fit no smaller number of ranks" in told
    assert three.pull("rank", "0") == [0]


NETS = """
import os, signal
def make(seed):
    torch.manual_seed(seed)
    net = nbdist.parallelize(torch.nn.Linear(4, 4), "ddp").model
    return net, torch.optim.SGD(net.parameters(), lr=0.1)
def step(net, opt):
    net(torch.ones(2, 4)).pow(2).sum().backward()
    opt.step(); opt.zero_grad()
gen, opt_gen = make(1)
disc, opt_disc = make(2)
step(gen, opt_gen); step(disc, opt_disc)
"""


def test_a_cell_saves_what_it_trains_also_after_a_rank_was_replaced(
    session: Session, tmp_path: Path
) -> None:
    def saved(name: str, code: str) -> list[str]:
        session.run(f"{code}\nnbdist.save({str(tmp_path / name)!r}, wait=True)", track=False)
        return sorted(nbdist.saved(tmp_path / name)[-1].models)

    session.run(NETS, track=False)
    assert saved("second", "other, opt_other = make(3); step(other, opt_other)") == ["other"]
    with pytest.raises(RankError):
        session.run("if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()")
    # Of two that were made together one may take turns with the other.
    assert saved("gan", "step(disc, opt_disc)") == ["disc", "gen"]
    assert saved("alone", "step(other, opt_other)") == ["other"]
    assert saved("all", "") == ["disc", "gen", "other"]
    said = session.run(f"nbdist.restore({str(tmp_path / 'second')!r})", track=False)[0].text
    assert "Here and not there is Linear (gen), Linear-2 (disc): they stay as they are." in said


ADVERSARIAL = """
torch.manual_seed(0)
nets = [torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)]
for net in nets:
    nbdist.parallelize(net, "ddp")
opts = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in nets]
halving = torch.optim.lr_scheduler.StepLR(opts[0], 1, 0.5)
"""
IN_TURNS = """
for step in range(STEPS):
    for net, opt in zip(nets, opts):
        opt.zero_grad()
        net(torch.ones(2, 3)).pow(2).mean().backward()
        opt.step()
        if opt is opts[0]:
            halving.step()
"""
HELD = "[[p.tolist() for net in nets for p in net.parameters()], halving.last_epoch]"


def test_two_optimizers_in_turns_are_saved_at_one_moment(session: Session) -> None:
    session.run(ADVERSARIAL)
    session.run(IN_TURNS, params={"STEPS": 6}, track=False)
    at_six = session.run(HELD).value_list
    session.run(ADVERSARIAL)
    session.run(IN_TURNS, params={"STEPS": 7}, track=False, checkpoint=2)
    session.run("nbdist.restore()")
    assert session.run(HELD).value_list == at_six


@pytest.mark.slow
def test_of_trainings_one_after_the_other_each_is_saved(session: Session) -> None:
    """Each cell trains the first network alone, and then the second."""
    phase = IN_TURNS.replace("zip(nets, opts)", "[one]").replace("\n", "\n    ")
    cell = f"for one, STEPS in zip(zip(nets, opts), MADE):{phase}"
    session.run(ADVERSARIAL)
    session.run(cell, params={"MADE": [9, 8]}, track=False)
    at_eight = session.run(HELD).value_list
    session.run(ADVERSARIAL)
    session.run(cell, params={"MADE": [9, 9]}, track=False, checkpoint=4)
    session.run("nbdist.restore()")
    assert session.run(HELD).value_list == at_eight
