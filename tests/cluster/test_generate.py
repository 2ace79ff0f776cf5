"""Text out of a spread model in cells: shown, beside a training, and after a fault in it."""

import pytest

from nbdist import RankError, Session
from tests.cluster.conftest import Kernel

MODEL = """
import copy
from torch import nn
from torch.nn import functional as F


class Words(nn.Module):
    def __init__(self, fails=False):
        super().__init__()
        self.token, self.fails = nn.Embedding(26, 16), fails
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16), nn.Dropout())
            for _ in range(2)
        )
        self.head = nn.Linear(16, 26)

    def forward(self, ids):
        if self.fails and not torch.is_grad_enabled() and ids.shape[1] == 5:
            raise ValueError("no fifth letter")
        x = self.token(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Letters:
    def decode(self, ids):
        return "".join(chr(97 + i) for i in ids)


prompt = torch.tensor([0, 1, 2])
data = torch.utils.data.TensorDataset(torch.arange(64).view(16, 4) % 26)


def train(layout, text):
    global optimizer
    optimizer = layout.optimizer(torch.optim.AdamW, lr=0.01)
    for _ in range(3):
        for (ids,) in nbdist.loader(data, global_batch=4):
            text(layout)
            layout.step(ids, (ids + 1) % 26, lambda out, y: F.cross_entropy(out.mT, y))
            text(layout)
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach().to_local().clone() for p in layout.model.parameters()]


def spread(layout, **options):
    torch.manual_seed(0)
    return nbdist.parallelize(Words(**options), layout)


def text(layout):
    layout.generate(prompt, max_new_tokens=3, do_sample=True, tokenizer=Letters())
"""


@pytest.fixture
def words(session: Session) -> Session:
    session.run(MODEL, track=False)
    return session


@pytest.mark.slow
def test_a_training_that_is_kept_and_watched_knows_nothing_of_texts_in_it(words: Session) -> None:
    words.run("without = train(spread('zero3'), lambda layout: None)", keep=True, track=False)
    words.run("texts = train(spread('zero3'), text)", keep=True, track=False)
    equal = words.run("all(map(torch.equal, texts, without)), len(texts)", track=False)
    assert [equal[rank].value for rank in (0, 1)] == [(True, 11)] * 2
    assert words.checks().found == {}
    assert "are equal bit for bit" in str(words.replay())


@pytest.mark.parametrize("layout", ["zero3", "pp=2", "tp=2"])
def test_a_fault_in_a_text_on_one_rank_frees_the_others_and_training_goes_on(
    words: Session, layout: str
) -> None:
    words.run(f"torch.manual_seed(0); one = spread('{layout}')", track=False)
    words.run("one.model.fails = rank == 1", track=False)
    with pytest.raises(RankError, match="no fifth letter"):
        words.run("one.generate(prompt, max_new_tokens=4)", track=False)
    modes = words.run("one.model.fails = False; one.model.training", track=False)
    assert [modes[rank].value for rank in (0, 1)] == [True, True]
    words.run(
        "tokens = one.generate(prompt, max_new_tokens=4)\n"
        "expected = prompt[None]\n"
        "plain = Words().eval(); state = one.state_dict()\n"
        "rank or plain.load_state_dict(state)\n"
        "with torch.no_grad():\n"
        "    for _ in range(4):\n"
        "        after = plain(expected)[:, -1:].argmax(-1)\n"
        "        expected = torch.cat([expected, after], 1)\n"
        "assert rank or torch.equal(tokens, expected)\n"
        "ids = torch.arange(8).view(2, 4)\n"
        "one.step(ids, ids, lambda out, y: F.cross_entropy(out.mT, y))",
        track=False,
    )


def test_a_notebook_shows_a_text_before_it_is_whole(notebook: Kernel) -> None:
    notebook.cell(MODEL, "--no-track")
    notebook.cell("one = spread('ddp')", "--no-track")
    shown = notebook.cell(
        "class Waiting(Letters):\n"
        "    def decode(self, ids):\n"
        "        if len(ids) == 6:\n"
        "            raise ValueError('the text stops here')\n"
        "        return super().decode(ids)\n"
        "one.generate(prompt, max_new_tokens=9, tokenizer=Waiting())",
        "--no-track",
    )
    assert shown.error is not None
    assert "rank 0 │ abc" in shown.text
