"""From sharded training to one program, or one error in words on every rank."""

import json
from pathlib import Path

import pytest

from tests.group.harness import run_ranks

RANKS = "tests.group.publish_ranks"
pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("zero3", marks=pytest.mark.slow),  # tracking/test_publish serves what it makes
        "tp=2",
        "pp=2",
        "ddp",
    ],
)
def test_a_spread_model_becomes_one_program_that_rank_0_tells_of(
    tmp_path: Path, layout: str
) -> None:
    (told, expected, said), (told_1, _, said_1) = run_ranks(
        2, f"{RANKS}:published", str(tmp_path), layout
    )
    assert said == said_1
    assert said.endswith("becomes a new version: models:/small@best")
    assert not told_1
    (model,) = told
    assert (model["name"], model["alias"]) == ("small", "best")
    assert model["inputs"][0] == "int64"
    assert model["inputs"][1][0] == -1, "any number of samples"
    folder = Path(model["folder"])
    assert {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()} == {
        "data/model.pt2",
        "example.json",
    }
    found = run_ranks(1, f"{RANKS}:run_program", str(folder))[0]
    assert found == pytest.approx(_flat(expected), abs=1e-5)


def _flat(nested: object) -> list[float]:
    if isinstance(nested, list):
        return [x for part in nested for x in _flat(part)]
    assert isinstance(nested, float)
    return [nested]


@pytest.mark.slow
def test_an_example_of_one_sample_makes_a_program_for_any_number(tmp_path: Path) -> None:
    assert run_ranks(1, f"{RANKS}:lengths", str(tmp_path)) == [[[-1, -1], [-1, 12]]]
    for folder in tmp_path.iterdir():
        request = json.loads((folder / "example.json").read_text())
        assert len(request["inputs"]) == 1
        assert len(run_ranks(1, f"{RANKS}:run_program", str(folder))[0]) % 12 == 0


def test_what_cannot_be_published_is_one_error_in_words_on_every_rank(tmp_path: Path) -> None:
    found = run_ranks(2, f"{RANKS}:refused", str(tmp_path))
    assert found[0].keys() == found[1].keys()
    words = {
        "decides": "Decides cannot be exported as one program: ",
        "random": "computes something else than the model",
        "shape": "Linear does not run with the example: RuntimeError",
        "text": "publish got a str as example",
        "two": "publish got a tuple as example",
        "none": "publish needs a batch to follow through the model",
        "empty": "has the shape (0, 4), and no sample",
        "name": "'a/b' is no name of a registered model",
        "v1": "'v1' is no alias of a registered model",
        "Latest": "'Latest' is no alias of a registered model",
        "best model": "'best model' is no alias of a registered model",
        "untracked": "run the cell without --no-track",
        "elsewhere": "There is no notebook here",
    }
    for texts in found:
        for label, text in words.items():
            assert texts[label].startswith("PublishError: "), label
            assert text in texts[label], label
    assert not list(tmp_path.iterdir()), "nothing is left behind"
