"""Experts of transformers' models on two ranks: proven, trained, saved, and read by any layout."""

from importlib.util import find_spec

import pytest

import nbdist
from tests.models.conftest import Said

pytestmark = [
    pytest.mark.timeout(200),
    pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed"),
]

FAMILIES = [
    *("Qwen2Moe", "Qwen3Moe", "Olmoe", "DeepseekV3", "GptOss", "Phimoe", "GraniteMoe"),
    *("Glm4Moe", "MiniMax", "Ernie4_5_Moe", "Dots1"),
]
SETUP = """
from torch.nn import functional as F
import transformers
def made(kind="Mixtral", how="grouped_mm"):
    torch.manual_seed(0)
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                 num_attention_heads=4, num_key_value_heads=2, use_cache=False,
                 max_position_embeddings=32, num_experts_per_tok=2, pad_token_id=0)
    # Each family has its own word for the number of experts, and the widths in them.
    sizes |= dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts"], 4)
    sizes |= dict(moe_intermediate_size=24, shared_expert_intermediate_size=24, n_shared_experts=1,
                  n_group=1, topk_group=1, first_k_dense_replace=0, decoder_sparse_step=1)
    if kind == "DeepseekV3":
        sizes |= dict(q_lora_rank=None, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8,
                      v_head_dim=8, num_key_value_heads=4)
    else:
        sizes["head_dim"] = 8
    config = getattr(transformers, kind + "Config")(**sizes)
    return getattr(transformers, kind + "ForCausalLM")._from_config(
        config, experts_implementation=how)
texts = torch.randint(64, (64, 12), generator=torch.Generator().manual_seed(1))
def loss_of(out, y):
    return F.cross_entropy(out.logits[:, :-1].flatten(0, 1), y[:, 1:].flatten())
def train(layout, opt, steps):
    losses = []
    for _, x in zip(range(steps), nbdist.loader(texts, global_batch=16, seed=3)):
        loss = loss_of(layout.model(input_ids=x), x)
        loss.backward()
        layout.clip_grad_norm_(1.0)
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses
"""


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("Mixtral", "grouped_mm"),
        *(
            pytest.param(kind, how, marks=pytest.mark.slow)
            for kind, how in [
                ("Mixtral", "eager"),
                ("Mixtral", "batched_mm"),
                ("Qwen3Moe", "eager"),
                *((family, "grouped_mm") for family in FAMILIES),
            ]
        ),
    ],
)
def test_experts_compute_as_in_one_process(session: nbdist.Session, kind: str, how: str) -> None:
    session.run(SETUP, track=False)
    ran = session.run(
        f"layout = nbdist.parallelize(made({kind!r}, {how!r}), 'ep=2')\n"
        "x = texts[8 * rank :][: 8 - rank]\n"  # ranks have unequal shares
        "proof = layout.verify(({'input_ids': x}, x), loss_of, steps=2)\n"
        "proof.ok, str(proof)",
        track=False,
    )
    ok, text = ran[0].value
    assert ok, text


def test_a_plain_loop_trains_without_a_word_and_what_it_saved_goes_on_as_shards(
    said: Said, session: nbdist.Session
) -> None:
    session.run(SETUP, track=False)
    words = said(
        "layout = nbdist.parallelize(made(), 'ep=2')\n"
        "model = layout.model\n"
        "opt = torch.optim.AdamW(model.parameters(), lr=1e-2)\n"
        "losses = train(layout, opt, 4)\n"
        "nbdist.save('experts', what=[model, opt], wait=True)\n"
        "before = layout.state_dict()"
    )
    assert words == {}
    assert session.trained is not None
    told = session.trained.telemetry
    tokens = sum(sum(values.values()) for _, values in told.experts.values())
    # Two ranks with 8 texts of 12 tokens, two experts each in two mixtures.
    assert tokens == sum(told.first_values("expert_tokens").values()) == 2 * 8 * 12 * 2 * 2
    ran = session.run(
        "found = {}\n"
        "for text in ('zero3', 'ep=2', 'ddp'):\n"
        "    layout = nbdist.parallelize(lambda: made(), text)\n"
        "    model = layout.model\n"
        "    opt = layout.optimizer(torch.optim.AdamW, lr=1e-2)\n"
        "    nbdist.restore('experts', only=['model', 'opt'])\n"
        "    after = layout.state_dict()\n"
        "    same = all(torch.equal(after[n], t) for n, t in before.items())\n"
        "    found[text] = (same, train(layout, opt, 2))\n"
        "found",
        track=False,
    )
    found = [of_rank.value for of_rank in ran.values()]
    for of_rank in found:
        assert all(same for same, _ in of_rank.values())
        (_, shards), (_, experts), (_, copies) = of_rank.values()
        # Moments of the optimizer came along: two more steps are the same under all.
        assert shards == pytest.approx(experts, rel=1e-5)
        assert copies == pytest.approx(experts, rel=1e-5)


def test_experts_of_a_list_are_saved_by_their_own_names_and_go_on_under_any_layout(
    said: Said, session: nbdist.Session
) -> None:
    words = said(
        "from tests.models.of_torch import Experts\n"
        "from torch.nn import functional as F\n"
        "x = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))\n"
        "y = torch.arange(64) % 2\n"
        "def steps(layout, opt, count):\n"
        "    for _, at in zip(range(count), nbdist.loader(range(64), global_batch=16, seed=3)):\n"
        "        loss = F.cross_entropy(layout.model(x[at]), y[at])\n"
        "        loss.backward()\n"
        "        layout.clip_grad_norm_(1.0)\n"
        "        opt.step()\n"
        "        opt.zero_grad()\n"
        "    return loss.item()\n"
        "layout = nbdist.parallelize(Experts(), 'ep=2')\n"
        "model = layout.model\n"
        "opt = torch.optim.AdamW(model.parameters(), lr=1e-2)\n"
        "steps(layout, opt, 3)\n"
        "nbdist.save('listed', what=[model, opt], wait=True)\n"
        "before = layout.state_dict()"
    )
    assert words == {}
    ran = session.run(
        "found = []\n"
        "for text in ('zero3', 'ep=2', 'ddp'):\n"
        "    layout = nbdist.parallelize(lambda: Experts(), text)\n"
        "    model = layout.model\n"
        "    opt = layout.optimizer(torch.optim.AdamW, lr=1e-2)\n"
        "    nbdist.restore('listed', only=['model', 'opt'])\n"
        "    after = layout.state_dict()\n"
        "    assert all(torch.equal(after[n], t) for n, t in before.items())\n"
        "    found.append(steps(layout, opt, 2))\n"
        "found, sorted(before) == sorted(Experts().state_dict())",
        track=False,
    )
    for losses, _ in (of_rank.value for of_rank in ran.values()):
        assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)
    assert ran[0].value[1]


def test_a_folder_that_experts_were_written_to_is_read_whole_and_into_experts(
    session: nbdist.Session,
) -> None:
    session.run(SETUP, track=False)
    ran = session.run(
        "layout = nbdist.parallelize(made(), 'ep=2')\n"
        "train(layout, torch.optim.SGD(layout.model.parameters(), lr=0.3), 2)\n"
        "layout.save_pretrained('mixtral')\n"
        "held = layout.state_dict()\n"
        "torch.distributed.barrier()\n"
        "plain = transformers.MixtralForCausalLM.from_pretrained('mixtral').state_dict()\n"
        "again = nbdist.from_pretrained('mixtral', 'ep=2').state_dict()\n"
        "[all(torch.equal(given[n], t) for n, t in held.items()) for given in (plain, again)]",
        track=False,
    )
    assert ran[0].value == [True, True]
    # Its own way writes what one rank has.
    with pytest.raises(nbdist.RankError, match=r"layout\.save_pretrained\(folder\) on all ranks"):
        session.run("layout.model.save_pretrained('own')", track=False)
