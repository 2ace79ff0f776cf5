"""Models of libraries under every layout: proven or refused in words, and as the table says."""

import os
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec

import pytest

import nbdist
from tests.models.layout_table import (
    EVERY_TIME,
    FILE,
    LAYOUTS,
    differences,
    ranks_of,
    read,
    written,
)
from tests.models.library import MODELS

WRITES = bool(os.environ.get("NBDIST_WRITE_LAYOUT_TABLE"))
PROVE = """
from tests.models.library import MODELS
case = MODELS[name]
torch.manual_seed(0)
model = case.make()
if hasattr(getattr(model, "config", None), "use_cache"):
    model.config.use_cache = False
samples = case.samples(8)
x = {key: one for key, one in samples.items() if key not in ("labels", "y")}
if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
    x[model.main_input_name] = x.pop("x")
    x["decoder_input_ids"] = samples["labels"].clamp(min=0)
if set(x) == {"x"}:
    x = x["x"]
def weighed(out, _y):
    out = getattr(out, "logits", out)
    out = out[0] if isinstance(out, tuple) else out
    each = out.flatten(1) if out.dim() else out.view(1, 1)
    return (each * torch.arange(1, each.shape[1] + 1).sin()).mean()
asks = {"tp": nbdist.TensorParallel, "cp": nbdist.ContextParallel, "pp": nbdist.Pipeline,
        "ep": nbdist.ExpertParallel}
few = {key: one[:2] for key, one in x.items()} if isinstance(x, dict) else x[:2]
def proven(*given):
    try:
        layout = nbdist.parallelize(model, text, *given)
        proof = layout.verify((x, None), weighed, steps=1)
    except nbdist.LayoutError as error:
        what = " ".join(error.what.split())
        if "any input that was tried" in what and not given:
            return proven(*(ask(example=few) for axis, ask in asks.items() if f"{axis}=" in text))
        return "refused: " + what
    if proof.ok:
        how = ", with an example" if given else ""
        return ("bit-equal" if proof.is_bit_equal else "noise floor") + how
    return "WRONG: " + proof.verdict
proven()
"""
CELLS = [
    pytest.param(
        *(model, layout), marks=[] if (model, layout) in EVERY_TIME else [pytest.mark.slow]
    )
    for ranks in (2, 4)
    for model in MODELS
    for layout in LAYOUTS
    if ranks_of(layout) == ranks
]


@pytest.fixture(scope="module")
def found() -> Iterator[dict[tuple[str, str], str]]:
    """What was proven; when the table is made anew, its other cells stay."""
    cells: dict[tuple[str, str], str] = {}
    yield cells
    if WRITES:
        before = read(FILE.read_text("utf-8")) if FILE.is_file() else {}
        FILE.write_text(written(before | cells, version("torch").partition("+")[0]), "utf-8")


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("model", "layout"), CELLS)
def test_a_model_is_proven_or_refused_as_the_table_says(
    session: nbdist.Session, found: dict[tuple[str, str], str], model: str, layout: str
) -> None:
    if find_spec(MODELS[model].library) is None:
        pytest.skip(f"{MODELS[model].library} is missing: pip install -c constraints.txt '.[test]'")
    if session.world_size != ranks_of(layout):
        session.scale(ranks_of(layout))
    params = {"name": model, "text": layout}
    cell = session.run(PROVE, params=params, track=False, timeout_s=110)[0].value
    found[model, layout] = str(cell)
    assert not str(cell).startswith("WRONG")
    if not WRITES:
        one = {(model, layout): str(cell)}
        assert list(differences(one, read(FILE.read_text("utf-8")))) == []


def test_a_layout_is_tried_on_as_many_ranks_as_it_names() -> None:
    assert [ranks_of(one) for one in ("zero3", "tp=2", "pp=2 tp=2")] == [2, 2, 4]


def test_the_table_has_every_model_and_layout() -> None:
    table = read(FILE.read_text("utf-8"))
    assert list(table) == [(model, layout) for model in MODELS for layout in LAYOUTS]
    assert "WRONG" not in FILE.read_text("utf-8")
