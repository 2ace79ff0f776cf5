"""What tp cuts by sections, experts and heads is saved, published and resumed as any other."""

import pytest

import nbdist

pytestmark = pytest.mark.timeout(200)

KINDS = ["gpt2", "mixtral", pytest.param("t5", marks=pytest.mark.slow)]
TRAIN = """
from pathlib import Path
from tests.models.library import MODELS
case = MODELS[name]
def spread(text, seed):
    torch.manual_seed(seed)
    made = case.make()
    if hasattr(made.config, "use_cache"):
        made.config.use_cache = False
    return made, nbdist.parallelize(made, text)
def step():
    torch.manual_seed(7)
    case.loss(model, case.samples(4)).backward()
    optimizer.step()
    optimizer.zero_grad()
def whole():
    held = {f"{i}.{key}": getattr(t, "full_tensor", lambda t=t: t)()
            for i, p in enumerate(model.parameters())
            for key, t in optimizer.state[p].items()}
    return {key: t.clone() for key, t in (layout.state_dict() | held).items()}
def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
# Begins with one process's weights: cut and put together, they are these to the bit.
torch.manual_seed(0)
plain = case.make().state_dict()
model, layout = spread("tp=2", 0)
state = layout.state_dict()
begins = rank > 0 or same(plain, dict(state))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
step()
moved = whole()
nbdist.save(folder, wait=True)
begins
"""
PROVE = """
samples = case.samples(8)
x = {"input_ids": samples["x"]}
if model.config.is_encoder_decoder:
    x["decoder_input_ids"] = samples["labels"].clamp(min=0)
proof = layout.verify(
    (x, samples["labels"]),
    lambda out, y: torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), y.flatten()),
    steps=1,
    optimizer=optimizer,
)
proof.ok, proof.verdict
"""
PUBLISH = """
import transformers
layout.save_pretrained(folder + "-pretrained")
def as_read():
    kind = getattr(transformers, type(model).__name__)
    return kind.from_pretrained(folder + "-pretrained").state_dict()
state = dict(layout.state_dict())
rank > 0 or same(state, as_read())
"""
RESUME = """
kept = moved
model, layout = spread(text, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
nbdist.restore(folder)
found = whole()
equal = same(kept, found)
step()
moved = whole()
nbdist.save(folder, wait=True)
equal
"""


def run(session: nbdist.Session, code: str, **params: object) -> list[object]:
    done = session.run(code, params=params, track=False, timeout_s=150)
    return [one.value for one in done.values()]


@pytest.mark.parametrize("name", KINDS)
def test_weights_and_states_are_those_of_the_plain_model_on_disk_and_in_ddp_and_back(
    session: nbdist.Session, name: str
) -> None:
    pytest.importorskip("transformers")
    folder = f"kinds-{name}"
    assert run(session, TRAIN, name=name, folder=folder) == [True, True]
    assert all(run(session, PROVE)[0])  # type: ignore[arg-type]
    assert run(session, PUBLISH) == [True, True]
    assert run(session, RESUME, text="ddp") == [True, True]
    assert run(session, RESUME, text="tp=2") == [True, True]
