"""What the ranks run in test_unused: parameters that get no gradient, under every layout."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from nbdist.engine.compat import torch_modules, torch_reducers
from nbdist.engine.data.order.shards import data_shard
from nbdist.engine.layout.layout import Layout
from nbdist.engine.layout.parallelize import parallelize
from nbdist.engine.layout.policies.efficiency import Compress
from nbdist.engine.layout.policies.policies import Pipeline
from nbdist.shared.errors import LayoutError
from tests.group.layout_ranks import whole
from tests.group.tensor_parallel_ranks import Block, D, V

STEPS = 2


class Net(nn.Module):
    """Has a layer that is never used, one in a block, and a head whose output no loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(V, D)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.blocks[1].spare = nn.Linear(D, 5)
        self.head, self.other = nn.Linear(D, V), nn.Linear(D, 2)
        self.unused = nn.Linear(D, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.token(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x), self.other(x)


def make() -> Net:
    torch.manual_seed(0)
    return Net().double()


def batch() -> tuple[Tensor, Tensor]:
    x = torch.randint(V, (8, 6), generator=torch.Generator().manual_seed(1))
    return x, x.flip(1)


def mine() -> tuple[Tensor, Tensor]:
    shard = data_shard()
    x, y = batch()
    return x.chunk(shard.count)[shard.index], y.chunk(shard.count)[shard.index]


def loss_of(out: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
    return F.cross_entropy(out[0].flatten(0, 1), y.flatten())


def spread(layout: str) -> Layout:
    policies = (Pipeline(microbatches=2),) if "pp" in layout else ()
    return parallelize(make(), layout, *policies)


def trains(layouts: list[str]) -> dict[str, float]:
    """Return how far weights are, after some steps, from those of one process."""
    alone, found = make(), {}
    opt = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    x, y = batch()
    for _ in range(STEPS):
        loss_of(alone(x), y).backward()
        opt.step()
        opt.zero_grad()
    expected = alone.state_dict()
    for layout in layouts:
        live = spread(layout)
        opt = torch.optim.AdamW(live.model.parameters(), lr=1e-2)
        for _ in range(STEPS):
            live.step(*mine(), loss_of)
            opt.step()
            opt.zero_grad()
        state = {name: whole(tensor) for name, tensor in live.model.state_dict().items()}
        found[layout] = max(float((state[n] - expected[n]).abs().max()) for n in state)
    return found


# ---- ddp: refused -------------------------------------------------------------------------------


def plain_loop(live: Layout) -> None:
    opt = live.optimizer(torch.optim.SGD, lr=0.1)
    x, y = mine()
    loss_of(live.model(x), y).backward()
    opt.step()


def backwards_alone(live: Layout) -> None:
    x, y = mine()
    for _ in range(2):
        loss_of(live.model(x), y).backward()


def stepped(live: Layout) -> None:
    live.step(*mine(), loss_of)


def in_parts(live: Layout) -> None:
    for _ in live.accumulate(2):
        live.step(*mine(), loss_of)


def refused(use: Callable[[Layout], None], layout: str = "ddp") -> dict[str, Any]:
    """Return what a use of ddp says, and whether weights stayed; then train after a reset."""
    live = spread(layout)
    before = [p.detach().clone() for p in live.model.parameters()]
    try:
        use(live)
        text = "accepted"
    except LayoutError as error:
        text = str(error)
    same = all(map(torch.equal, before, live.model.parameters()))
    reducer = torch_modules.reducer_of(live.model)
    assert reducer is not None
    torch_reducers.reset_ddp(reducer)  # as after a cell that has failed
    out = live.model(mine()[0])
    (loss_of(out, mine()[1]) + out[1].mean() + unused_parts(live.model)).backward()
    live.optimizer(torch.optim.SGD, lr=0.1).step()
    return {"text": text, "unchanged": same}


def unused_parts(model: Any) -> Tensor:
    parts = [*model.unused.parameters(), *model.blocks[1].spare.parameters()]
    return sum((p.sum() for p in parts), torch.zeros(()).double()) * 0


def a_branch_not_taken() -> str:
    """Train until a step leaves a layer out, with gradients that are set to zero."""

    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.always, self.sometimes = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, takes: bool) -> Tensor:
            x = self.always(x)
            return self.sometimes(x) if takes else x

    model = Branching()
    live = parallelize(model, "ddp")
    opt = live.optimizer(torch.optim.SGD, lr=0.1)
    try:
        for takes in (True, True, False):
            model(torch.ones(2, 4), takes).sum().backward()
            opt.step()
            opt.zero_grad(set_to_none=False)
    except LayoutError as error:
        return str(error)
    return "accepted"


# ---- The refusals' advice, followed ------------------------------------------------------------


class Experts(nn.Module):
    """Two blocks of which a sample needs one; both run, as is advised."""

    def __init__(self) -> None:
        super().__init__()
        self.expert = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor, taken: Tensor) -> Tensor:
        each = [expert(x) * (taken == i) for i, expert in enumerate(self.expert)]
        return each[0] + each[1]


def all_run_on_all(layouts: list[str]) -> dict[str, float]:
    """Return how far weights are from one process's where each rank needs another expert."""

    def train(model: nn.Module, x: Tensor, taken: Tensor) -> dict[str, Tensor]:
        opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(STEPS):
            model(x, taken).square().mean().backward()
            opt.step()
            opt.zero_grad()
        return {name: whole(tensor) for name, tensor in model.state_dict().items()}

    x = torch.randn(2, 6, D, generator=torch.Generator().manual_seed(1)).double()
    taken = torch.arange(2).view(2, 1, 1)
    found, rank = {}, dist.get_rank()
    for layout in ["", *layouts]:
        torch.manual_seed(0)
        model = Experts().double()
        if not layout:
            expected = train(model, x, taken)
            continue
        parallelize(model, layout)
        state = train(model, x[rank : rank + 1], taken[rank : rank + 1])
        found[layout] = max(float((state[n] - expected[n]).abs().max()) for n in state)
    return found


def frozen_before(layout: str) -> float:
    """Return how far weights are from one process's where what no loss uses is frozen."""
    x, y = batch()
    states = []
    for spreads in (False, True):
        model = make()
        for part in (model.blocks[1].spare, model.other, model.unused):
            part.requires_grad_(False)
        if spreads:
            parallelize(model, layout)
            x, y = mine()
        opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(STEPS):
            loss_of(model(x), y).backward()
            opt.step()
            opt.zero_grad()
        states.append({name: whole(tensor) for name, tensor in model.state_dict().items()})
    return max(float((states[0][n] - states[1][n]).abs().max()) for n in states[0])


# ---- Frozen and thawed after parallelize -------------------------------------------------------

# Which layers are trained, a phase each: adapters in turns, thawed one by one, frozen again. Where
# none is, replicas go on in another group, as when ranks are scaled.
PHASES = ((0,), (1,), (0,), (0, 2), (), (0, 1, 2), (2,))


class Adapters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layer:
            x = layer(x).tanh()
        return x


def train_in_turns(layout: str, *policies: Any) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model, x = Adapters().double(), torch.randn(8, 4).double()
    live: Layout | None = None
    for phase in PHASES:
        for i, layer in enumerate(model.layer):
            layer.requires_grad_(i in phase)
        if layout and live is None:
            live = parallelize(model, layout, *policies)
            x = x.chunk(2)[dist.get_rank()]
        if not phase:
            if live is not None and live.can_follow:
                live.follow()
            continue
        opt: torch.optim.Optimizer
        if live is None:
            opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
        else:
            opt = live.optimizer(torch.optim.AdamW, lr=1e-2)
        for _ in range(STEPS + 1):
            model(x).square().mean().backward()
            opt.step()
            opt.zero_grad()
    return {name: whole(tensor) for name, tensor in model.state_dict().items()}


def in_turns(layouts: list[str]) -> dict[str, float]:
    """Return how far weights are from one process's where what is trained changes."""
    expected, found = train_in_turns(""), {}
    for layout in layouts:
        state = train_in_turns(layout)
        found[layout] = max(float((state[n] - expected[n]).abs().max()) for n in state)
    return found


def thawed_under_compression() -> str:
    try:
        train_in_turns("ddp", Compress("bf16"))
    except LayoutError as error:
        return str(error)
    return "accepted"


def unlike_on_ranks() -> tuple[str, bool]:
    """Return what a forward says where each rank trains a layer of its own, and both the last.

    And whether replicas are equal when all have trained the same after it.
    """
    torch.manual_seed(0)
    model, x = Adapters().double(), torch.randn(4, 4).double() * (dist.get_rank() + 1)
    live, text = parallelize(model, "ddp"), "accepted"
    for unlike in (True, False):
        for i, layer in enumerate(model.layer):
            layer.requires_grad_(i == (dist.get_rank() if unlike else 0) or i == 2)
        opt = live.optimizer(torch.optim.SGD, lr=0.1)
        try:
            model(x).square().mean().backward()
            opt.step()
        except LayoutError as error:
            text = str(error)
    own = torch.cat([p.detach().flatten() for p in model.parameters()])
    both = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(both, own)
    return text, torch.equal(*both)


def grown(change: Callable[[nn.ModuleList], object]) -> str:
    """Change a model's layers after parallelize, and train them."""
    model = Adapters()
    live = parallelize(model, "ddp")
    change(model.layer)
    return trained(model, live.optimizer(torch.optim.SGD, lr=0.1))


def grown_later(add: Callable[[torch.optim.Optimizer, list[nn.Parameter]], object]) -> str:
    """Give a model a layer that its optimizer trains too, after both have stepped."""
    model = Adapters()
    live = parallelize(model, "ddp")
    opt = live.optimizer(torch.optim.SGD, lr=0.1)
    assert trained(model, opt) == "accepted"
    one_more_layer(model.layer)
    add(opt, list(model.layer[-1].parameters()))
    return trained(model, opt)


def trained(model: nn.Module, opt: torch.optim.Optimizer) -> str:
    """Return why a step was refused."""
    try:
        model(torch.ones(2, 4)).sum().backward()
        opt.step()
    except LayoutError as error:
        return str(error)
    return "accepted"


def another_head(layers: nn.ModuleList) -> None:
    layers[2] = nn.Linear(4, 4)


def one_more_layer(layers: nn.ModuleList) -> None:
    layers.append(nn.Linear(4, 4))


# ---- ddp: right programs ------------------------------------------------------------------------


def two_networks_in_one() -> bool:
    """An actor and a critic in one module, a backward and an optimizer each: as in one process."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.actor, self.critic = nn.Linear(4, 2), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.actor(x), self.critic(x)

    def train(model: Any, x: Tensor) -> list[Tensor]:
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            acts, values = model(x)
            acts.square().mean().backward()
            values.square().mean().backward()
            opt.step()
            opt.zero_grad()
        return [p.detach() for p in model.parameters()]

    torch.manual_seed(0)
    alone = Both().double()
    torch.manual_seed(0)
    live = Both().double()
    x = torch.randn(8, 4).double()
    parallelize(live, "ddp")
    rank = dist.get_rank()
    pairs = zip(train(live, x.chunk(2)[rank]), train(alone, x), strict=True)
    return all(torch.allclose(a, b, rtol=0, atol=1e-14) for a, b in pairs)


def with_a_penalty() -> bool:
    """Two optimizers, gradients of inputs, and a model that another's loss runs through."""
    maker, judge = (nn.Linear(4, 4).double() for _ in range(2))
    parallelize(maker, "ddp")
    parallelize(judge, "ddp")
    opts = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (maker, judge)]
    x = torch.ones(2, 4).double()
    for _ in range(2):
        judge(maker(x).detach()).square().mean().backward()
        seen = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(judge(seen).sum(), seen, create_graph=True)
        assert slope.requires_grad
        opts[1].step()
        opts[1].zero_grad()
        judge(maker(x)).mean().backward()
        opts[0].step()
        for opt in opts:
            opt.zero_grad()
    return True


def on_two_ranks() -> dict[str, Any]:
    """One group for all that two ranks prove."""
    return {
        "trains": trains(["zero2", "zero3", "tp=2", "pp=2"]),
        "plain loop": refused(plain_loop),
        "no step": refused(backwards_alone),
        "layout.step": refused(stepped),
        "accumulate": refused(in_parts),
        "zero1": refused(plain_loop, "zero1"),
        "branch": a_branch_not_taken(),
        "all run": all_run_on_all(["ddp", "zero2", "zero3"]),
        "frozen": frozen_before("ddp"),
        "in turns": in_turns(["ddp", "zero1", "zero2", "zero3"]),
        "compressed": thawed_under_compression(),
        "unlike": unlike_on_ranks(),
        "grown": [grown(another_head), grown(one_more_layer)],
        "grown later": [
            grown_later(lambda opt, new: opt.add_param_group({"params": new})),
            grown_later(lambda opt, new: opt.param_groups[0]["params"].extend(new)),
        ],
        "two networks": two_networks_in_one(),
        "penalty": with_a_penalty(),
    }
