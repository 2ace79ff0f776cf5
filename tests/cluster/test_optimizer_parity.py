"""`layout.verify(..., optimizer=)`: an optimizer on parts is compared with one on the whole."""

import pytest

import nbdist

PROGRAM = """
class Trust(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1):
        super().__init__(params, {{"lr": lr}})
    def size(self, t):
        return t.norm()
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad * (self.size(p) / self.size(p.grad)), alpha=-group["lr"])
# Those that are wrong are so where a trial on two small matrices does not see it.
class TrustIf(Trust):
    def __init__(self, params, lr=0.1, of_parts=False):
        super().__init__(params, lr)
        self.of_parts = of_parts
    def size(self, t):
        is_tried = len(self.param_groups[0]["params"]) <= 2
        return t.norm().item() if self.of_parts and not is_tried else t.norm()
class TrustOfParts(TrustIf):
    def __init__(self, params, lr=0.1, of_parts=True):
        super().__init__(params, lr, of_parts)
class Raises(Trust):
    def size(self, t):
        if hasattr(t, "to_local") and len(self.param_groups[0]["params"]) > 2:
            raise RuntimeError("no strategy preserves this placement")
        return t.norm()
class Scaled(torch.optim.Muon):
    times = 1.0
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            held = [], [], []
            self._init_group(group, *held)
            before = [p.clone() for p in held[0]]
            options = {{k: v for k, v in group.items() if k not in ("params", "initial_lr")}}
            torch.optim._muon.muon(*held, has_complex=False, **options)
            for was, p in zip(before, held[0]):
                if len(held[0]) == 1 and p.numel() > 200:
                    p.copy_(was + (p - was) * self.times)
class Noisy(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn_like(p), alpha=1e-3)
class NeedsMore(Trust):
    def __init__(self, params, model, lr=0.1):
        super().__init__(params, lr)
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = (torch.nn.Linear(*s, bias=False) for s in ((8, 32), (32, 8)))
    def forward(self, x): return x + self.down(self.up(x).relu())
torch.manual_seed(0)
net = torch.nn.Sequential(Block(), Block(), Block(), Block())
layout = nbdist.parallelize(net, {layout!r})
{make}
torch.manual_seed(layout.shape.data_part(rank)[0])
batch = torch.randn(4, 6, 8), torch.randn(4, 6, 8)
kept = [p.detach().clone() for p in net.parameters()]
try:
    proof = layout.verify(batch, torch.nn.functional.mse_loss, optimizer=opt)
    said = proof.ok, repr(proof)
except nbdist.LayoutError as error:
    said = None, str(error)
local = lambda t: t.to_local() if hasattr(t, "to_local") else t
same = all(torch.equal(local(a), local(b)) for a, b in zip(kept, net.parameters(), strict=True))
said, same, len(opt.state)
"""


def verify(session: nbdist.Session, layout: str, make: str) -> tuple[bool | None, str]:
    ran = session.run(PROGRAM.format(layout=layout, make=make), track=False)
    first, *others = ran.value_list
    (ok, text), same, states = first
    assert same, "weights are as they were"
    assert states == 0, "and so is the user's optimizer"
    assert all(other[0] == first[0] for other in others)
    return ok, text


# Those that only `make test-all` proves.
LAYOUTS_OF = {
    "AdamW": ("ddp", "zero3", "tp=2", "pp=2"),
    "Muon": ("ddp", "zero1", "zero3", "pp=2"),
    "Adafactor": ("tp=2",),
}


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("AdamW", "zero1"),
        ("Muon", "tp=2"),
        ("Adafactor", "zero3"),
        *(
            pytest.param(kind, text, marks=pytest.mark.slow)
            for kind, texts in LAYOUTS_OF.items()
            for text in texts
        ),
    ],
)
def test_optimizers_of_torch_are_proven_under_every_layout(
    session: nbdist.Session, kind: str, layout: str
) -> None:
    ok, text = verify(session, layout, f"opt = layout.optimizer(torch.optim.{kind}, lr=0.02)")

    assert ok, text
    assert f"over 3 steps, with {kind}" in text
    if layout == "zero3":  # as one process has them, gradients give one process' updates
        assert "equal bit for bit" in text


@pytest.mark.slow
def test_norms_that_are_left_to_torch_are_right_on_parts(session: nbdist.Session) -> None:
    ok, text = verify(session, "zero3", "opt = Trust(net.parameters())")
    assert ok, text


def test_an_optimizer_that_takes_a_part_for_the_whole_differs_and_the_weight_is_named(
    session: nbdist.Session,
) -> None:
    ok, text = verify(session, "zero3", "opt = TrustOfParts(net.parameters())")
    assert ok is False
    assert "DIFFERS: the update of " in text
    assert "at step 1 by " in text
    assert "with TrustOfParts" in text


@pytest.mark.parametrize(
    "times", [0.5, *(pytest.param(t, marks=pytest.mark.slow) for t in (0.0, 1.5, 2.0, -1.0))]
)
def test_muon_whose_updates_are_wrong_in_turns_differs_beyond_its_own_rounding(
    session: nbdist.Session, times: float
) -> None:
    make = f"Scaled.times = {times}; opt = Scaled(net.parameters(), lr=0.01)"
    ok, text = verify(session, "zero3", make)
    assert ok is False, text


@pytest.mark.slow
def test_what_an_optimizer_keeps_on_itself_is_proven_too(session: nbdist.Session) -> None:
    ok, text = verify(session, "zero3", "opt = TrustIf(net.parameters(), of_parts=True)")
    assert ok is False, text
    ok, text = verify(session, "zero3", "opt = TrustIf(net.parameters())")
    assert ok, text


def test_updates_that_are_chance_are_said_to_tell_nothing(session: nbdist.Session) -> None:
    ok, text = verify(session, "ddp", "opt = Noisy(net.parameters(), lr=0.1)")
    assert ok is None
    assert text.startswith("What Noisy does on parts cannot be told from chance.")


def test_hooks_of_steps_are_left_out_and_that_is_said(session: nbdist.Session) -> None:
    hooked = (
        "opt = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "_ = opt.register_step_pre_hook(lambda *_: None)"
    )
    ok, text = verify(session, "ddp", hooked)
    assert ok, text
    assert "Hooks of this SGD's steps were left out" in text


def test_a_small_learning_rate_is_raised_and_that_is_said(session: nbdist.Session) -> None:
    ok, text = verify(session, "ddp", "opt = torch.optim.AdamW(net.parameters(), lr=3e-4)")
    assert ok, text
    assert "AdamW stepped with a learning rate of 0.01 in place of 0.0003" in text


def test_one_that_raises_on_parts_is_refused_with_layouts_that_keep_tensors_whole(
    session: nbdist.Session,
) -> None:
    ok, text = verify(session, "zero3", "opt = Raises(net.parameters())")
    assert ok is None
    assert text.startswith("Raises does not step on parts of tensors, as this layout has them.")
    ok, text = verify(session, "zero1", "opt = layout.optimizer(Raises)")
    assert ok, text


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            "opt = torch.optim.LBFGS(net.parameters())",
            "LBFGS does not step on whole tensors in one process.",
        ),
        ("opt = NeedsMore(net.parameters(), net)", "No second NeedsMore can be made"),
        (
            "opt = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=1)",
            "This SGD trains nothing of the model that is verified.",
        ),
    ],
)
def test_one_that_cannot_be_proven_is_refused_with_the_reason(
    session: nbdist.Session, make: str, said: str
) -> None:
    ok, text = verify(session, "ddp", make)
    assert ok is None
    assert said in text
