"""An optimizer that looks at whole matrices is right on parts of them, or refused before a step."""

import pytest

import nbdist

CUT = ("zero2", "zero3", "tp=2")
PROGRAM = """
class Lamb(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1):
        super().__init__(params, {{"lr": lr}})
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
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = (torch.nn.Linear(*s, bias=False) for s in ((8, 16), (16, 8)))
    def forward(self, x): return x + self.down(self.up(x).relu())
def after(text):
    torch.manual_seed(0)
    net, x = torch.nn.Sequential(Block(), Block()), torch.randn(4, 6, 8)
    begin = {{n: p.detach().clone() for n, p in net.named_parameters()}}
    layout = nbdist.parallelize(net, text) if text else None
    if text == "zero1":
        opt = layout.optimizer({kind}, lr=0.1)
    else:
        opt = {kind}(net.parameters(), lr=0.1)
    net(x).pow(2).mean().backward()
    said = ""
    try:
        opt.step()
    except nbdist.LayoutError as error:
        said = str(error)
    whole = lambda p: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach()
    end = {{n: whole(p) for n, p in net.named_parameters()}}
    return said, {{n: end[n] - begin[n] for n in end}}
said, got = after({text!r})
_, alone = after(None)
moved = max(got[n].abs().max().item() for n in got)
off = max(((got[n] - alone[n]).norm() / alone[n].norm()).item() for n in alone)
said, moved, off
"""


def run(session: nbdist.Session, kind: str, text: str) -> list[tuple[str, float, float]]:
    ran = session.run(PROGRAM.format(kind=kind, text=text), track=False)
    return [tuple(value) for value in ran.value_list]


@pytest.mark.parametrize("text", CUT)
@pytest.mark.parametrize("kind", ["LambOfNumbers", "torch.optim.Adafactor"])
def test_one_that_is_wrong_on_parts_is_refused_with_the_layouts_that_keep_matrices_whole(
    session: nbdist.Session, kind: str, text: str
) -> None:
    for said, moved, _ in run(session, kind, text):
        assert f"{kind.split('.')[-1]} cannot train parts of matrices" in said
        assert '"ddp" keeps matrices whole, and "zero1"' in said
        assert moved == 0.0


def test_what_an_optimizer_keeps_on_itself_is_tried_too(session: nbdist.Session) -> None:
    kind = "(lambda *params, **options: LambIf(*params, **options, of_numbers=True))"
    for said, moved, _ in run(session, kind, "zero3"):
        assert "LambIf cannot train parts of matrices" in said
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
        assert off < rounding


@pytest.mark.parametrize("text", ["ddp", "zero1"])
@pytest.mark.parametrize("kind", ["LambOfNumbers", "torch.optim.Adafactor", "torch.optim.Muon"])
def test_layouts_that_keep_matrices_whole_take_all_of_them(
    session: nbdist.Session, kind: str, text: str
) -> None:
    for said, _, off in run(session, kind, text):
        assert said == ""
        assert off < 1e-5
