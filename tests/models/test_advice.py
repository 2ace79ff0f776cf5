"""What a refusal of a library's model says to do about it: followed, it works, or none is given."""

import pytest

import nbdist

pytestmark = pytest.mark.timeout(120)

CONTEXT = """
from tests.models.library import MODELS
def refused(made):
    try:
        nbdist.parallelize(made, "cp=2")
    except nbdist.LayoutError as error:
        return str(error)
torch.manual_seed(0)
told = {name: refused(MODELS[name].make()) for name in ("gemma2", "mamba", "bloom")}
llama = MODELS["llama"].make()
llama.set_attn_implementation("eager")
told["llama"] = refused(llama)
llama.set_attn_implementation("sdpa")
x = MODELS["llama"].samples(8)["x"]
layout = nbdist.parallelize(llama, "cp=2")
def proven(x, y):
    of = lambda out, y: torch.nn.functional.cross_entropy(out.logits.mT, y)
    return layout.verify((x, y), of, steps=1).ok
in_one_row = {"input_ids": x, "position_ids": (torch.arange(12) % 5).expand(8, 12)}
told, proven(x, x), proven(in_one_row, x)
"""
WORDS = """
from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES
from nbdist.engine.layout.axes.tp import plan_words
def refused(word):
    try:
        plan_words.read(torch.nn.Sequential(torch.nn.Linear(2, 2)), {"0": word}, "it", "")
    except nbdist.LayoutError as error:
        return str(error)
{word: refused(word) for word in ALL_PARALLEL_STYLES.valid_keys()}
"""
# Each does more than a cut at a module's ends, or needs a model's own sizes; two are for ep.
UNKNOWN = {
    *("ep_dispatch_experts", "grouped_gemm"),
    *("all_reduce", "embedding_colwise", "local_params", "mla_kv_a_proj"),
    *("moe_identity_expert", "sequence_parallel"),
}


@pytest.fixture(autouse=True)
def _needs_transformers() -> None:
    pytest.importorskip("transformers")


def test_a_switch_of_transformers_is_advised_where_it_changes_nothing(
    session: nbdist.Session,
) -> None:
    told, is_proven, documents_are = session.run(CONTEXT, track=False)[0].value
    assert 'attn_implementation="sdpa"' in told["llama"]
    assert is_proven
    assert documents_are
    assert "caps scores at 50" in told["gemma2"]
    assert "tells no heads of attention" in told["mamba"]
    assert "transformers has no such attention" in told["bloom"]
    assert not any("attn_implementation" in told[name] for name in ("gemma2", "mamba", "bloom"))


def test_each_of_transformers_words_for_a_cut_is_known_or_refused_by_name(
    session: nbdist.Session,
) -> None:
    found = session.run(WORDS, track=False)[0].value
    refused = {word: text for word, text in found.items() if text}
    # Of parameters alone: a module is no stack of experts.
    assert set(refused) - {"packed_rowwise", "moe_tp_experts"} <= UNKNOWN
    assert all(word in text or "experts" in text for word, text in refused.items())
