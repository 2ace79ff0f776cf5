"""Experts of transformers' models on four ranks, two of which have parts of each weight."""

from importlib.util import find_spec

import pytest

import nbdist
from tests.models.test_experts import SETUP

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed"),
]


@pytest.fixture(scope="module")
def four(session: nbdist.Session) -> nbdist.Session:
    session.scale(4)
    session.run(SETUP, track=False)
    return session


@pytest.mark.parametrize(
    ("kind", "dtype"),
    # The routers of the others compute in float32, whatever the model's dtype is.
    [("Qwen3Moe", "double"), ("Mixtral", "float"), ("DeepseekV3", "float")],
)
def test_experts_beside_tp_compute_as_in_one_process(
    four: nbdist.Session, kind: str, dtype: str
) -> None:
    ran = four.run(
        f"layout = nbdist.parallelize(made({kind!r}, 'batched_mm').{dtype}(), 'ep=2 tp=2')\n"
        "x = texts[8 * (rank // 2) :][: 8 - rank // 2]\n"  # ranks of tp have the same
        "proof = layout.verify(({'input_ids': x}, x), loss_of, steps=2)\n"
        "proof.ok, str(proof)",
        track=False,
    )
    ok, text = ran[0].value
    assert ok, text


def test_what_was_trained_and_clipped_is_read_plainly_and_goes_on_under_other_layouts(
    four: nbdist.Session,
) -> None:
    ran = four.run(
        "layout = nbdist.parallelize(made(how='batched_mm'), 'ep=2 tp=2')\n"
        "model = layout.model\n"
        "opt = torch.optim.AdamW(model.parameters(), lr=1e-2)\n"
        "train(layout, opt, 3)\n"
        "nbdist.save('beside tp', what=[model, opt], wait=True)\n"
        "layout.save_pretrained('mixtral beside tp')\n"
        "held = layout.state_dict()\n"
        "torch.distributed.barrier()\n"
        "plain = transformers.MixtralForCausalLM.from_pretrained('mixtral beside tp')\n"
        "plain = plain.state_dict()\n"
        "same = all(torch.equal(plain[n], t) for n, t in held.items())\n"
        "found = []\n"
        "for text in ('ep=2 tp=2', 'dp=2 ep=2', 'dp=2 tp=2', 'fsdp=2 ep=2'):\n"
        "    layout = nbdist.parallelize(lambda: made(how='batched_mm'), text)\n"
        "    model = layout.model\n"
        "    opt = layout.optimizer(torch.optim.AdamW, lr=1e-2)\n"
        "    nbdist.restore('beside tp', only=['model', 'opt'])\n"
        "    after = layout.state_dict()\n"
        "    same = same and all(torch.equal(after[n], t) for n, t in held.items())\n"
        "    x = texts[:16]\n"
        "    loss = layout.step({'input_ids': x[:4]}, x[:4], loss_of)\n"
        "    norm = layout.clip_grad_norm_(1.0)\n"
        "    opt.step()\n"
        "    opt.zero_grad()\n"
        "    with torch.no_grad():\n"
        "        again = loss_of(model(input_ids=x), x)\n"
        "    found.append((same, loss.item(), float(norm), again.item()))\n"
        "found",
        track=False,
    )
    for of_rank in ran.values():
        first, *others = of_rank.value
        assert first[0]
        for other in others:
            assert other == pytest.approx(first, rel=1e-5)
