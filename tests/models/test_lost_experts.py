"""A rank of four that dies with its experts, of which another rank has the same."""

from importlib.util import find_spec
from pathlib import Path

import pytest

import nbdist
from tests.models.conftest import ROOT
from tests.models.test_experts import SETUP

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(200),
    pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed"),
]


def test_a_new_rank_gets_the_experts_of_the_one_that_holds_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with nbdist.start(n=4, device="cpu") as session:
        session.run(SETUP, track=False)
        session.run(
            "layout = nbdist.parallelize(made(), 'dp=2 ep=2')\n"
            "opt = torch.optim.AdamW(layout.model.parameters(), lr=1e-2)\n"
            "_ = train(layout, opt, 3)\n"
            "norm_of = lambda: sum(float(t.double().norm()) for t in layout.state_dict().values())",
            track=False,
        )
        (before, *_) = (of.value for of in session.run("norm_of()", track=False).values())
        with pytest.raises(nbdist.RankError, match="rank 3's from rank 1"):
            session.run("import os\nif rank == 3: os.kill(os.getpid(), 9)", track=False)
        (after, *_) = (of.value for of in session.run("norm_of()", track=False).values())
        assert after == before
        ran = session.run(
            "_ = train(layout, opt, 2)\n"
            "x = texts[4 * rank :][:4]\n"
            "proof = layout.verify(({'input_ids': x}, x), loss_of, steps=2)\n"
            "proof.ok, str(proof)",
            track=False,
        )
        ok, text = ran[3].value
        assert ok, text
