"""A forward that no backward follows leaves the next one the weights that were trained since."""

import pytest

from nbdist import Session

MAKE = """
torch.manual_seed(0)
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(3, 4)
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(3)])
        self.last = torch.nn.Linear(4, 1)
    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.last(x)
layout = nbdist.parallelize(Net(), "LAYOUT")
net = layout.model
opt = torch.optim.AdamW(net.parameters(), lr=0.1)
items = torch.arange(36.0).reshape(6, 2, 3) / 36
losses = []
for x in [*items, *items]:
    loss = (net(x[rank : rank + 1]) - 1).square().mean()
    AROUND
    losses.append(loss.item())
losses
"""
AFTER_BACKWARD = "loss.backward(); net(x); opt.step(); opt.zero_grad()"
BEFORE_BACKWARD = "net(x); loss.backward(); opt.step(); opt.zero_grad()"
TWICE = "loss.backward(); net(x); net(-x); opt.step(); opt.step(); net(x); opt.zero_grad()"


def losses(session: Session, layout: str, around: str) -> list[list[float]]:
    code = MAKE.replace("LAYOUT", layout).replace("AROUND", around)
    return list(session.run(code, track=False).value_list)


@pytest.mark.parametrize("layout", ["zero2", "zero3"])
@pytest.mark.parametrize("around", [AFTER_BACKWARD, BEFORE_BACKWARD, TWICE])
def test_a_forward_between_backward_and_step_does_not_keep_old_weights(
    session: Session, layout: str, around: str
) -> None:
    expected = losses(session, "ddp", around)
    for found, wanted in zip(losses(session, layout, around), expected, strict=True):
        assert found == pytest.approx(wanted, rel=1e-5)


def test_an_optimizer_that_steps_within_the_backward_leaves_what_it_needs(
    session: Session,
) -> None:
    make = """
opts = {p: torch.optim.SGD([p], lr=0.1) for p in net.parameters()}
for p, one in opts.items():
    p.register_post_accumulate_grad_hook(lambda p: (opts[p].step(), opts[p].zero_grad()) and None)
"""
    plain = MAKE.replace("torch.optim.AdamW", "torch.optim.SGD")
    plain = plain.replace("LAYOUT", "zero3").replace(
        "AROUND", "loss.backward(); opt.step(); opt.zero_grad()"
    )
    expected = list(session.run(plain, track=False).value_list)
    within = MAKE.replace("LAYOUT", "zero3").replace("AROUND", "loss.backward()")
    within = within.replace("opt = torch.optim.AdamW(net.parameters(), lr=0.1)\n", make)
    for found, wanted in zip(session.run(within, track=False).value_list, expected, strict=True):
        assert found == pytest.approx(wanted, rel=1e-5)
