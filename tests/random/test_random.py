"""Trials of random cells, models and faults: a few here, more slow ones, 500 by `make trials`."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import nbdist
from nbdist import Session
from tests.cluster.test_half_steps import LAYOUTS as HALF_STEP_LAYOUTS
from tests.cluster.test_half_steps import STRIKE
from tests.random import steps
from tests.random.acts import FAULTS, Make, Model, Train
from tests.random.calls import Calls
from tests.random.drive import perform
from tests.random.layouts import LAYOUTS
from tests.random.trial import draw
from tests.random.world import World

ROOT = Path(__file__).resolve().parents[2]


def run_trials(tmp_path: Path, first: int, count: int) -> None:
    words = f"-m tests.random --seed {first} --trials {count} --resume".split()
    ran = subprocess.run(
        [sys.executable, *words, str(tmp_path / "trials.jsonl")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"


@pytest.mark.timeout(300)  # a bound: a trial takes about five seconds
def test_a_random_trial_is_right(tmp_path: Path) -> None:
    run_trials(tmp_path, 1004, 1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_random_trials_are_right(tmp_path: Path) -> None:
    run_trials(tmp_path, 2001, 60)


def test_a_seed_gives_the_same_trial_each_time() -> None:
    assert [draw(seed) for seed in range(50)] == [draw(seed) for seed in range(50)]


def test_trials_end_in_trainings_with_every_fault_and_layout_and_all_that_may_follow() -> None:
    drawn = [steps.draw(seed, 2) for seed in range(1, 501)]
    assert drawn == [steps.draw(seed, 2) for seed in range(1, 501)]
    assert {one.fault for one in drawn} == set(STRIKE)
    assert {one.layout for one in drawn} == set(HALF_STEP_LAYOUTS)
    assert {name for one in drawn for name in one.names} == set(steps.PARTS)


def test_five_hundred_trials_have_every_fault_and_every_layout() -> None:
    trained = [act for s in range(1, 501) for act in draw(s).acts if isinstance(act, Train)]
    models = [
        m for s in range(1, 501) for a in draw(s).acts if isinstance(a, Make) for m in a.models
    ]
    assert {act.fault.kind for act in trained} == set(FAULTS)
    assert {model.layout for model in models} == set(LAYOUTS)


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with nbdist.start(n=2, device="cpu", threads=1) as session:
        yield session


MODEL = Model("m1", "mlp", "ddp", "momentum", "index", 1)
WRONG = {
    "a weight of both ranks": ("with torch.no_grad(): m1[0].weight[0, 0] += 1e-6", "wrong weights"),
    "a weight of one rank": (
        "with torch.no_grad(): m1[0].weight[0, 0] += 1e-15 * rank",
        "replicas differ in bits",
    ),
    "the optimizer": ("o_m1.state.clear()", "wrong weights"),
    "a variable": ("varied = 1", "a wrong value"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_what_is_made_wrong_on_purpose_is_found(session: Session, tmp_path: Path) -> None:
    for name, (code, kind) in WRONG.items():
        folder = tmp_path / name
        folder.mkdir()
        world = World(2, Calls(session, folder))
        world.calls.run("varied = 0")
        world.held.variables["varied"] = {0: {0}, 1: {0}}
        perform(world, Make((MODEL,)))
        perform(world, Train(("m1",), 3))
        assert not world.driven.findings, world.driven.story
        world.calls.run(code)
        perform(world, Train(("m1",), 3))
        assert kind in {finding.kind for finding in world.driven.findings}, name
