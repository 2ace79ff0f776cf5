"""The cells of a trial, as a user would write them. Pure: text from plain values."""

import random
from collections.abc import Sequence
from textwrap import indent

from tests.random.acts import NO_FAULT, Fault, Model, whole_epochs
from tests.random.layouts import is_piped

BEGIN = "import torch.nn.functional as F; from torch import nn"
_KIT = (
    "from tests.random.data import batch, dataset, noise\n"
    "from tests.random.on_rank import Leave, strike"
)

ARCHITECTURE = {
    "linear": "nn.Linear(4, 2)",
    "mlp": "nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))",
    # A bias before the norm would have gradients that are nought but for rounding.
    "batchnorm": "nn.Sequential(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh(), "
    "nn.Linear(6, 2))",
    "dropout": "nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 2))",
    "deep": "nn.Sequential(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)), "
    "nn.Linear(4, 2))",
    "attention": "Attention()",
}
_ATTENTION = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(4, 4) for _ in range(3))
    def forward(self, x):
        parts = (part(x).unflatten(-1, (-1, 2)) for part in (self.q, self.k, self.v))
        heads = (part.transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return x + mixed.transpose(1, 2).flatten(2)
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(4, 2)
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)
"""
OPTIMIZER = {
    "sgd": ("torch.optim.SGD", "lr=0.1"),
    "momentum": ("torch.optim.SGD", "lr=0.05, momentum=0.9"),
    "adam": ("torch.optim.Adam", "lr=0.02"),
}
# A rate of nothing would leave steps that cannot be told apart.
_SCHEDULERS = (
    "StepLR({}, 3, 0.5)",
    "CosineAnnealingLR({}, 10, eta_min=1e-3)",
    "LambdaLR({}, lambda i: 0.9**i)",
)


# What people write above a cell's own lines: it awaits, or is no plain Python.
_ABOVE = ("", "", "", "import asyncio; await asyncio.sleep(0)\n", "!true\n", "_ = %pwd\n")


def written(code: str, draw: random.Random) -> str:
    """Return a cell as one of several people would write it."""
    return draw.choice(_ABOVE) + code


def make(models: Sequence[Model], members: Sequence[Sequence[int]]) -> str:
    """Return a cell that makes models; `members` are the ranks of each."""
    parts = [_made(model, ranks) for model, ranks in zip(models, members, strict=True)]
    return "\n".join([BEGIN, _KIT, *parts])


def make_optimizer(model: Model) -> str:
    """Return a cell that makes the optimizer of a model again, as its error has told."""
    return "\n".join([BEGIN, _optimizer(model)])


def plain_model(model: Model) -> str:
    """Return the lines that make a model, without its layout."""
    classes = _ATTENTION if model.architecture == "attention" else ""
    return f"{classes}torch.manual_seed({model.seed})\n{model.name} = {_net(model)}.double()"


def scheduler(model: Model, optimizer: str) -> str:
    """Return what makes the scheduler of a model's optimizer; by its seed it is of another kind."""
    kind = _SCHEDULERS[model.seed % len(_SCHEDULERS)]
    return f"torch.optim.lr_scheduler.{kind.format(optimizer)}"


def seed(noise: int) -> str:
    """Return a cell that seeds all generators."""
    return (
        "import random; import numpy as np\n"
        f"torch.manual_seed({noise}); np.random.seed({noise}); random.seed({noise})"
    )


def train(
    models: Sequence[Model],
    members: Sequence[int],
    begins: Sequence[int],
    steps: int,
    fault: Fault,
    flag: str,
    style: str = "apart",
    noise: int = 0,
) -> str:
    """Return a cell that trains models, a step of each in turn.

    Args:
        models: All of one kind of data; of loaders one.
        members: The ranks that train them.
        begins: How many steps each has made.
        steps: How many it makes; of a loader, as many as make whole epochs.
        fault: What strikes in it, before a step of the first model.
        flag: Begins the names of the files that remember that it has struck.
        style: `apart`: the models are there. `guarded`: the cell makes the model unless it is
            there; `together`: it makes it anew each time.
        noise: Not 0: each step draws from all generators.
    """
    head = [BEGIN, _KIT]
    first = models[0]
    if style == "together":
        head.append(_made(first, members))
    elif style == "guarded":
        head += [f'if "{first.name}" not in globals():', indent(_made(first, members), "    ")]
    strikes_at = begins[0] + fault.step
    parts = []
    for model, begin in zip(models, begins, strict=True):
        struck = fault if model is first else NO_FAULT
        parts.append(_step(model, begin - begins[0], struck, strikes_at, flag, noise))
    loop = _loop(first, begins[0], steps, "\n".join(parts))
    if fault.kind == "leaves early":
        loop = f"try:\n{indent(loop, '    ')}\nexcept Leave: pass"
    if first.group is not None:
        loop = f"if rank in {tuple(members)}:\n{indent(loop, '    ')}"
    return "\n".join([*head, loop])


def reduce(group: str | None, ranks: Sequence[int], fault: Fault, flag: str) -> str:
    """Return a cell whose value is the sum of 2 to the rank over a group, on its members."""
    parts = [_KIT, "t = torch.tensor([2.0 ** rank])"]
    body = "dist.all_reduce(t)" if group is None else f"dist.all_reduce(t, group={group})"
    if fault.kind != "none":
        body = f"if rank in {fault.ranks}: strike({fault.kind!r}, {flag!r})\n{body}"
    if fault.kind == "leaves early":
        body = f"try:\n{indent(body, '    ')}\nexcept Leave: pass"
    if group is not None:
        body = f"if rank in {tuple(ranks)}:\n{indent(body, '    ')}"
    return "\n".join([*parts, body, "t.item()"])


def message(sender: int, receiver: int, sent: int, room: int) -> str:
    """Return a cell whose value is the sum of what a rank has received, 0 on the others."""
    return (
        f"t = torch.zeros({room})\n"
        f"if rank == {sender}: dist.send(torch.ones({sent}), {receiver})\n"
        f"if rank == {receiver}: dist.recv(t, {sender})\n"
        "t.sum().item()"
    )


def drop(name: str, ranks: Sequence[int]) -> str:
    """Return a cell that deletes a model, and whatever else holds it, on some ranks."""
    names = [f"{prefix}{name}" for prefix in ("", "o_", "l_", "p_", "d_")] + ["out"]
    return f"if rank in {tuple(ranks)}:\n    for name in {names}: globals().pop(name, None)"


def look(models: Sequence[str], variables: Sequence[str]) -> str:
    """Return a cell whose value is what a rank holds."""
    names = f"{list(models)!r}, {list(variables)!r}"
    return f"__import__('tests.random.on_rank', fromlist=['look']).look(globals(), {names})"


def _loop(model: Model, begin: int, steps: int, body: str) -> str:
    """Return the loop of a model that stands at step `begin`, over the data of its kind."""
    if model.data == "loader":
        end = whole_epochs(begin + steps) // 5
        return (
            f"while d_{model.name}.epoch < {end}:\n"
            f"    for x, y in d_{model.name}:\n"
            f"        i = d_{model.name}.epoch * 5 + d_{model.name}.consumed // 12 - 1\n"
            + indent(body, "        ")
        )
    if model.data == "schedule":
        return (
            f"while p_{model.name}.last_epoch < {begin + steps}:\n"
            f"    i = p_{model.name}.last_epoch\n" + indent(body, "    ")
        )
    return f"for i in range({begin}, {begin + steps}):\n" + indent(body, "    ")


def _net(model: Model) -> str:
    return ARCHITECTURE[model.architecture]


def _made(model: Model, members: Sequence[int]) -> str:
    name, layout = model.name, model.layout
    lines = [plain_model(model)]
    if layout in ("DDP", "DDP and ZeRO"):
        lines.append(f"{name} = nn.parallel.DistributedDataParallel({name})")
    elif layout == "DDP on a group":
        lines.append(
            f"{name} = nn.parallel.DistributedDataParallel({name}, process_group={model.group})"
        )
    elif layout == "fully_shard":
        lines.append(f"torch.distributed.fsdp.fully_shard({name})")
    else:
        policy = ', nbdist.Pipeline("1f1b", 2)' if is_piped(layout) else ""
        lines.append(f'l_{name} = nbdist.parallelize({name}, "{layout}"{policy})')
    lines.append(_optimizer(model))
    if model.has_schedule:
        lines.append(f"p_{name} = {scheduler(model, f'o_{name}')}")
    if model.data == "loader":
        lines.append(
            f"d_{name} = nbdist.loader(dataset({model.seed}), global_batch=12, "
            f"shuffle={bool(model.seed % 2)}, seed={model.seed})"
        )
    if model.group is not None:
        made = indent("\n".join(lines), "    ")
        return f"if rank in {tuple(members)}:\n{made}"
    return "\n".join(lines)


def _optimizer(model: Model) -> str:
    kind, options = OPTIMIZER[model.optimizer]
    name = model.name
    if model.layout == "zero1":
        return f"o_{name} = l_{name}.optimizer({kind}, {options})"
    if model.layout == "DDP and ZeRO":
        return (
            "from torch.distributed.optim import ZeroRedundancyOptimizer\n"
            f"o_{name} = ZeroRedundancyOptimizer({name}.parameters(), {kind}, {options})"
        )
    return f"o_{name} = {kind}({name}.parameters(), {options})"


def _step(model: Model, ahead: int, fault: Fault, strikes_at: int, flag: str, noise: int) -> str:
    """Return the lines of one step of a model whose count is `ahead` of the loop's."""
    name, step = model.name, "i" if not ahead else f"i + {ahead}"
    struck = f"if rank in {fault.ranks} and i == {strikes_at}: "
    strike = f"strike({fault.kind!r}, {flag!r})"
    lines: list[str] = []

    def place(*sites: str) -> None:
        if fault.kind != "none" and fault.site in sites:
            lines.append(struck + strike)

    if model.data != "loader":
        lines.append(f"x, y = batch({model.seed}, {step}, {model.spread.share})")
    if model.architecture == "attention":
        lines.append("x, y = x[None], y[None]")
    if noise:
        lines.append("x = x + 0.1 * (torch.rand(1).item() + np.random.rand() + random.random())")
    if model.architecture == "dropout":
        lines.append(f"torch.manual_seed(noise({model.seed}, {step}, rank))")
    if is_piped(model.layout):
        place("before forward", "before backward", "in backward")
        lines.append(f"l_{name}.step(x, y, F.mse_loss)")
    else:
        place("before forward")
        lines.append(f"out = {name}(x)")
        if fault.kind != "none" and fault.site == "in backward":
            lines.append(f"{struck}out.register_hook(lambda grad: {strike})")
        place("before backward")
        lines.append("F.mse_loss(out, y).backward()")
        if model.seed % 4 == 1 and model.architecture in ("linear", "mlp", "deep"):
            lines.append(f"{name}(x)  # no backward follows")
    place("before step")
    lines.append(f"o_{name}.step(); o_{name}.zero_grad()")
    if model.has_schedule:
        lines.append(f"p_{name}.step()")
    place("after step")
    return "\n".join(lines)
