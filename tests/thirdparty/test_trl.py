"""TRL's trainers on a layout: losses, norms and weights are those of one process.

Of GRPO, which generates by chance, one process replays what both ranks have generated.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import nbdist
from tests.thirdparty.test_libraries import refused
from tests.thirdparty.trl_cells import REPLAY, TRAIN

pytestmark = pytest.mark.skipif(
    find_spec("trl") is None,
    reason="TRL is not installed (pip install -c constraints.txt '.[test]')",
)

SPREAD = """
def spread(layout):
    model = llama()
    if layout:
        nbdist.parallelize(model, layout)
    return model
"""
ADAPTED = """
from peft import LoraConfig, get_peft_model

LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian")

def adapted(layout):
    torch.manual_seed(3)
    model = get_peft_model(llama(), LORA)
    if layout:
        nbdist.parallelize(model, layout)
    return model
"""
ALONE = """
import json
print(json.dumps({"sft": sft(llama(), 4), "dpo": dpo(llama(), 4)}))
"""
FLOOR = 1e-4  # of norms in float32, after up to three steps of AdamW


@pytest.fixture(scope="module")
def ranks(shared: nbdist.Session) -> nbdist.Session:
    shared.run(TRAIN + SPREAD, track=False)
    return shared


def in_one_process(code: str, folder: Path, given: str = "") -> Any:
    """Run this in a plain process of one rank; return what it prints last, read as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf")},
        input=given,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """Loss and norm of each step of one process, on batches twice as large."""
    found: dict[str, list[float]] = in_one_process(TRAIN + ALONE, tmp_path_factory.mktemp("alone"))
    return found


@pytest.mark.parametrize("trainer", ["sft", pytest.param("dpo", marks=pytest.mark.slow)])
def test_a_trainer_has_the_losses_of_one_process_on_its_own_and_on_layouts(
    trainer: str, ranks: nbdist.Session, session: nbdist.Session, alone: dict[str, list[float]]
) -> None:
    expected = pytest.approx(alone[trainer], rel=FLOOR)
    assert len(alone[trainer]) == 8  # of 4 steps
    for layout in (None, "ddp", "zero3"):
        found = ranks.run(f"{trainer}(spread({layout!r}), 2)", track=False).value_list
        assert found == [expected] * 2, layout


def largest_difference(ranks: nbdist.Session, layout: str | None, folder: Path) -> float:
    """Train by GRPO; compare the parameters with those of one process on what was generated."""
    ranks.run(f"_, seen, parameters = grpo(spread({layout!r}), GENERATIONS)", track=False)
    first, second = ranks.pull("parameters")
    assert first == second
    generated = ranks.pull("seen")
    assert [len(steps) for steps in generated] == [8, 8]
    expected = in_one_process(TRAIN + REPLAY, folder, json.dumps(generated))
    return max(abs(a - b) for a, b in zip(first, expected, strict=True))


def test_grpo_on_shards_learns_from_what_all_ranks_generate(
    ranks: nbdist.Session, session: nbdist.Session, tmp_path: Path
) -> None:
    # 8e-6 after 8 steps of AdamW, whose rate is 0.01.
    assert largest_difference(ranks, "zero3", tmp_path) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("layout", [None, "ddp"])
def test_grpo_by_itself_and_on_ddp_learns_from_what_all_ranks_generate(
    ranks: nbdist.Session, session: nbdist.Session, tmp_path: Path, layout: str | None
) -> None:
    assert largest_difference(ranks, layout, tmp_path) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["sft", "dpo"])
def test_adapters_train_on_shards_as_by_the_trainer_alone(
    trainer: str, ranks: nbdist.Session, session: nbdist.Session
) -> None:
    ranks.run(ADAPTED, track=False)
    own, shards = (
        ranks.run(f"{trainer}(adapted({layout!r}), 2)", track=False).value_list
        for layout in (None, "zero3")
    )
    assert own[0] == own[1]
    assert shards == [pytest.approx(own[0], rel=FLOOR)] * 2


REFUSED = {
    "some ranks need the same": 'sft(spread("tp=2"), 2)',
    "in the layout .pp=2. some ranks need the same": 'dpo(spread("pp=2"), 2)',
    "lora_A.default.weight, .* are not averaged": 'sft(spread("zero3"), 2, peft_config=LORA)',
    "model.add_adapter cannot follow": 'dpo(adapted("zero3"), 2, ref_model=None)',
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_a_trainer_cannot_do_on_a_layout_is_refused_in_words(
    words: str, ranks: nbdist.Session, session: nbdist.Session
) -> None:
    refused(ranks, ADAPTED + REFUSED[words], words)
