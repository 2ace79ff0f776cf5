"""What transformers makes masks of, cut along the sequence: documents in one row, padding."""

import pytest

import nbdist
from tests.models.test_layouts import PROVE

# What `make test` runs of it is in test_advice (documents) and test_layouts (t5).
pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

FLOOR = 1e-12  # float64: the order of summation
CUT = """
from copy import deepcopy
from torch.nn import functional as F
from tests.models.library import MODELS
from tests.models.trained import WORDS

def ids(length, rows=2):
    return (torch.arange(rows * length).view(rows, length) * 7 + 3) % (WORDS - 4) + 3

def of_lengths(*rows):
    return torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in rows])

def padded(length, *left_out):
    return torch.stack([torch.arange(length) < length - n for n in left_out]).long()

def relative(mine, theirs):
    largest = theirs.abs().max().clamp(min=1e-6)
    return float((mine - theirs).abs().max() / largest)

def differs(name, inputs, policy):
    "Return by kind of input how far outputs and gradients are from one process's."
    torch.manual_seed(0)
    alone = MODELS[name].make().double()
    alone.config.use_cache = False
    for module in alone.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    alone.eval()
    model = deepcopy(alone)
    layout = nbdist.parallelize(model, "cp=2", policy)
    found = {}
    for kind, x in inputs.items():
        made = []
        y = x.get("decoder_input_ids", x.get("input_ids")).flip(1)
        for one, own in ((model, layout.own(y)), (alone, y)):
            one.zero_grad()
            logits = one(**x).logits
            F.cross_entropy(logits.flatten(0, 1), own.flatten()).backward()
            made.append((logits.detach(), [p.grad for p in one.parameters()]))
        (out, gradients), (expected, theirs) = made
        expected = layout.own(expected)
        pairs = [(a, b) for a, b in zip(gradients, theirs) if b is not None and b.abs().max() > 0]
        found[kind] = max(relative(out, expected), *(relative(a, b) for a, b in pairs))
    return found
"""
PACKED = (
    CUT
    + """
places = of_lengths((5, 4, 7), (9, 7))
document = (places == 0).cumsum(-1)
same = document[:, :, None] == document[:, None, :]
block = (same & torch.ones(16, 16, dtype=torch.bool).tril())[:, None]
added = torch.zeros(block.shape).double().masked_fill(~block, torch.finfo(torch.float64).min)
inputs = {
    "positions": {"position_ids": places},
    "a mask": {"attention_mask": block},
    "a mask and positions": {"attention_mask": block, "position_ids": places},
    "a mask of numbers": {"attention_mask": added},
    "one row": {"input_ids": ids(16, 1), "position_ids": places[:1]},
    "padding": {"attention_mask": padded(16, 5, 3)},
    "padding before": {"attention_mask": padded(16, 5, 3).flip(1)},
}
inputs = {kind: {"input_ids": ids(16)} | x for kind, x in inputs.items()}
differs(name, inputs, nbdist.ContextParallel(method, loss=loss))
"""
)


@pytest.fixture(autouse=True)
def _needs_transformers() -> None:
    pytest.importorskip("transformers")


def worst(session: nbdist.Session, code: str, **params: object) -> dict[str, float]:
    """Return the larger difference of two ranks, by kind of input."""
    one, other = (
        cell.value for cell in session.run(code, params=params, track=False, timeout_s=150).values()
    )
    return {kind: max(one[kind], other[kind]) for kind in one}


@pytest.mark.parametrize(
    ("name", "method", "loss"),
    [
        (name, method, loss)
        for name in ("llama", "gpt2", "mistral", "bert", "falcon")
        for method in ("ulysses", "gather")
        for loss in (False, True)
        if not (loss and name == "gpt2")  # it makes outputs as long as its inputs: no parts
    ],
)
def test_documents_in_one_row_and_padded_texts_are_those_of_one_process(
    session: nbdist.Session, name: str, method: str, loss: bool
) -> None:
    found = worst(session, PACKED, name=name, method=method, loss=loss)
    assert len(found) == 7
    assert max(found.values()) <= FLOOR, found


TWO = (
    CUT
    + """
def given(length, target, left_out, left_out_of_target):
    x = {"decoder_input_ids": ids(target).flip(0)}
    if name == "whisper":  # its sounds have one length
        x["input_features"] = torch.linspace(-3, 3, 2 * 8 * 24).double().view(2, 8, 24).sin()
    else:
        x |= {"input_ids": ids(length), "attention_mask": padded(length, *left_out)}
    return x | {"decoder_attention_mask": padded(target, *left_out_of_target)}
inputs = {
    "longer texts": given(16, 8, (5, 0), (0, 3)),
    "longer targets": given(8, 12, (0, 3), (1, 5)),
    "equal lengths": given(12, 12, (2, 4), (4, 1)),
}
for kind in ("longer texts", "longer targets"):
    plain = {key: one for key, one in inputs[kind].items() if not key.endswith("mask")}
    inputs[kind + ", whole"] = plain
differs(name, inputs, nbdist.ContextParallel(method, loss=loss))
"""
)


@pytest.mark.parametrize(
    ("name", "method", "loss"),
    [
        (name, method, loss)
        for name in ("t5", "bart", "whisper")
        for method in ("ulysses", "gather")
        for loss in (False, True)
    ],
)
def test_an_encoder_and_a_decoder_of_other_lengths_are_those_of_one_process(
    session: nbdist.Session, name: str, method: str, loss: bool
) -> None:
    found = worst(session, TWO, name=name, method=method, loss=loss)
    assert len(found) == 5
    assert max(found.values()) <= FLOOR, found


@pytest.mark.parametrize("name", ["decoder", "t5", "whisper", "opt", "falcon"])
@pytest.mark.parametrize("layout", ["cp=2 tp=2", "fsdp=2 cp=2"])
def test_models_are_cut_along_sequences_and_over_another_axis(
    session: nbdist.Session, name: str, layout: str
) -> None:
    if session.world_size != 4:
        session.scale(4)
    cells = session.run(PROVE, params={"name": name, "text": layout}, track=False, timeout_s=150)
    assert {cell.value for cell in cells.values()} <= {"noise floor", "bit-equal"}
