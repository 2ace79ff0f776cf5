"""An optimizer that looks at whole matrices is right on parts of them, or refused before a step."""

from pathlib import Path

import pytest

import nbdist

CUT = ("zero2", "zero3", "tp=2")
KINDS = """
from torch.distributed.tensor import DTensor, Replicate
class Lamb(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})
    def ratio(self, p):
        return p.norm() / p.grad.norm()
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad * self.ratio(p), alpha=-group["lr"])
class LambOfNumbers(Lamb):
    def ratio(self, p):
        return p.norm().item() / p.grad.norm().item()
class LambIf(Lamb):
    def __init__(self, params, lr=0.1, of_numbers=False):
        super().__init__(params, lr)
        self.of_numbers = of_numbers
    def ratio(self, p):
        ratio = p.norm() / p.grad.norm()
        return p.norm().item() / p.grad.norm().item() if self.of_numbers else ratio
class Calling(LambOfNumbers):
    def step(self, closure=None):
        return super().step(closure)
class Counting(LambOfNumbers):
    made = 0
    def step(self, closure=None):
        self.made += 1
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        super().step(closure)
    def ratio(self, p):
        state = self.state[p]
        state["count"] = state.get("count", 0) + 1
        assert state["count"] == self.made == self.param_groups[0]["count"]
        return super().ratio(p) / self.made
class OfAll(Lamb):
    @torch.no_grad()
    def step(self, closure=None):
        groups = self.param_groups
        off = sum(p.grad.norm().item() ** 2 for group in groups for p in group["params"]) ** 0.5
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad / off, alpha=group["lr"])
class Later(LambOfNumbers):
    @torch.no_grad()
    def step(self, closure=None):
        held = [(p, group["lr"]) for group in self.param_groups for p in group["params"]]
        for p, lr in held:
            p.add_(p.grad * self.ratio(p), alpha=-lr)
class Noisy(LambOfNumbers):
    def ratio(self, p):
        return super().ratio(p) * torch.rand(()).item()
ByLists = lambda params, lr: torch.optim.Adafactor(params, lr=lr, foreach=True)
IfNumbers = lambda params, lr=0.1: LambIf(params, lr, of_numbers=True)
"""
PROGRAM = (
    KINDS
    + """
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = (torch.nn.Linear(*s, bias=BIAS) for s in ((8, 16), (16, 8)))
    def forward(self, x): return x + self.down(self.up(x).relu())
data = torch.randn(8, 4, 6, 8, generator=torch.Generator().manual_seed(1))
whole = lambda p: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach()
def begin(text):
    global layout
    torch.manual_seed(0)
    net = torch.nn.Sequential(Block(), Block())
    layout = nbdist.parallelize(net, text) if text else None
    if text == "zero1":
        return net, layout.optimizer(KIND, lr=0.1)
    return net, KIND(net.parameters(), lr=0.1)
def train(net, opt, steps):
    for at in steps:
        net(data[at]).pow(2).mean().backward()
        opt.step()
        opt.zero_grad()
def off(net, other):
    pairs = zip(net.parameters(), other.parameters(), strict=True)
    return max(float((whole(a) - whole(b)).norm() / whole(b).norm()) for a, b in pairs)
"""
)
TRAIN = """
net, opt = begin(TEXT)
said, before = "", [whole(p).clone() for p in net.parameters()]
try:
    train(net, opt, range(3))
except nbdist.LayoutError as error:
    said = str(error)
alone, one = begin(None)
moved = max(float((whole(p) - b).abs().max()) for p, b in zip(net.parameters(), before))
if not said:
    train(alone, one, range(3))
said, moved, off(net, alone)
"""


def begun(kind: str, *, bias: bool, text: str = "") -> str:
    return PROGRAM.replace("KIND", kind).replace("BIAS", str(bias)) + TRAIN.replace(
        "TEXT", repr(text)
    )


def run(
    session: nbdist.Session, kind: str, text: str, *, bias: bool = False
) -> list[tuple[str, float, float]]:
    ran = session.run(begun(kind, bias=bias, text=text), track=False)
    return [tuple(value) for value in ran.value_list]


@pytest.mark.parametrize("text", CUT)
@pytest.mark.parametrize("kind", ["LambOfNumbers", "torch.optim.Adafactor", "ByLists"])
def test_one_that_is_wrong_on_parts_steps_on_whole_ones_as_one_process(
    session: nbdist.Session, kind: str, text: str
) -> None:
    """Of vectors a layout makes parts, too."""
    for said, moved, off in run(session, kind, text, bias=True):
        assert said == ""
        assert moved > 0.0
        assert off < 1e-6 if text == "tp=2" else off == 0.0


@pytest.mark.parametrize("kind", ["IfNumbers", "Calling", "Counting", "OfAll"])
def test_it_does_so_whatever_its_step_keeps_counts_and_calls(
    session: nbdist.Session, kind: str
) -> None:
    """An attribute of its own, its base's step, counts in three places, a norm over all."""
    for said, moved, off in run(session, kind, "zero3"):
        assert said == ""
        assert moved > 0.0
        assert off == 0.0


@pytest.mark.parametrize("text", ["zero3", "tp=2"])
@pytest.mark.parametrize("kind", ["Later", "Noisy"])
def test_one_that_is_wrong_so_too_is_refused_with_the_layouts_that_keep_matrices_whole(
    session: nbdist.Session, kind: str, text: str
) -> None:
    """It holds all matrices at once, or draws what other ranks draw otherwise."""
    for said, moved, _ in run(session, kind, text):
        assert f"{kind} cannot train parts of matrices" in said
        assert '"ddp" keeps matrices whole, and "zero1"' in said
        assert "whose step goes once through self.param_groups" in said
        assert moved == 0.0


@pytest.mark.parametrize("text", CUT)
@pytest.mark.parametrize(
    ("kind", "rounding"), [("torch.optim.Muon", 0.05), ("Lamb", 1e-5), ("torch.optim.AdamW", 1e-5)]
)
def test_one_that_is_right_on_parts_trains_as_one_process(
    session: nbdist.Session, kind: str, rounding: float, text: str
) -> None:
    for said, moved, off in run(session, kind, text):
        assert said == ""
        assert moved > 0.0
        # Muon computes in bfloat16, and shards have the gradients of one process bit by bit.
        assert off == 0.0 if "Muon" in kind and text != "tp=2" else off < rounding


@pytest.mark.parametrize("text", ["ddp", "zero1"])
@pytest.mark.parametrize("kind", ["LambOfNumbers", "torch.optim.Adafactor", "torch.optim.Muon"])
def test_layouts_that_keep_matrices_whole_take_all_of_them(
    session: nbdist.Session, kind: str, text: str
) -> None:
    for said, _, off in run(session, kind, text):
        assert said == ""
        assert off < 1e-5


@pytest.mark.parametrize(
    ("saved", "restored"),
    [
        ("zero3", "tp=2"),
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in (("zero3", "ddp"), ("ddp", "zero3"), ("tp=2", "zero2"))
        ),
    ],
)
def test_what_it_remembers_goes_on_in_another_layout_as_in_one_process(
    session: nbdist.Session, tmp_path: Path, saved: str, restored: str
) -> None:
    program = begun("torch.optim.Adafactor", bias=True, text=saved)
    session.run(f"{program}\nnbdist.save({str(tmp_path)!r})", track=False)
    ran = session.run(
        f"net, opt = begin({restored!r})\n"
        f"nbdist.restore({str(tmp_path)!r})\n"
        "train(net, opt, range(3, 6)); train(alone, one, range(3, 6))\n"
        "off(net, alone)",
        track=False,
    )
    for off in ran.value_list:
        assert off < 1e-6 if "tp=2" in (saved, restored) else off == 0.0


@pytest.mark.slow
def test_a_kept_step_is_made_again_on_whole_matrices(session: nbdist.Session) -> None:
    program = begun("torch.optim.Adafactor", bias=True, text="zero3").rpartition("net, opt =")[0]
    loop = (
        "net, opt = begin('zero3')\n"
        "for at in range(6):\n"
        "    layout.step(data[at], data[at], torch.nn.functional.mse_loss)\n"
        "    opt.step(); opt.zero_grad()\n"
    )
    session.run(program + loop, keep=True, track=False)
    said = str(session.replay(5))
    assert "the losses of all" in said
    assert "are equal bit for bit" in said


def test_it_sends_its_part_of_weight_and_gradient_and_of_each_state_of_that_shape(
    session: nbdist.Session,
) -> None:
    counting = (
        "from torch.distributed.tensor.debug import CommDebugMode\n"
        "for p in net.parameters(): p.grad = torch.ones_like(p)\n"
        "with CommDebugMode() as sent: opt.step()\n"
        "len(list(net.parameters())), sent.get_total_counts()"
    )
    for kind, each in (("torch.optim.Adafactor", 2), ("torch.optim.Muon", 3), ("Lamb", 0)):
        session.run(begun(kind, bias=False, text="zero3"), track=False)
        for tensors, gathers in session.run(counting, track=False).value_list:
            assert gathers == each * tensors or (each == 0 and gathers <= 2 * tensors)
