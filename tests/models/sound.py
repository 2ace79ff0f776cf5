"""Draw sound trainings, as people write them: cells for two ranks. Pure: text from a seed.

What is drawn may be unusual, and is right: of it no rule on silent mistakes may say anything.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, fields
from textwrap import indent

NETS = {
    "mlp": "nn.Linear(6, {w}), nn.ReLU(), nn.Linear({w}, 3)",
    "dropout": "nn.Linear(6, {w}), nn.ReLU(), nn.Dropout(0.3), nn.Linear({w}, 3)",
    "batch norm": "nn.Linear(6, {w}), nn.BatchNorm1d({w}), nn.ReLU(), nn.Linear({w}, 3)",
    "layer norm": "nn.Linear(6, {w}), nn.LayerNorm({w}), nn.GELU(), nn.Linear({w}, 3)",
    "convolution": "nn.Unflatten(1, (1, 6)), nn.Conv1d(1, {w}, 3), nn.BatchNorm1d({w}), nn.ReLU(), "
    "nn.Dropout1d(0.1), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear({w}, 3)",
    "cut": "nn.Sequential(nn.Linear(6, {w}), nn.ReLU(), nn.Linear({w}, 6)), nn.Dropout(0.2), "
    "nn.Linear(6, 3)",
}
LAYOUTS = ("ddp", "zero1", "zero2", "zero3", "tp=2", "DDP", "fully_shard")
OPTIMIZERS = {
    "SGD": "lr={lr}",
    "SGD with momentum": "lr={lr}, momentum=0.9, nesterov=True",
    "Adam": "lr={lr}",
    "AdamW": "lr={lr}, weight_decay=0.1",
    "Adagrad": "lr={lr}",
    "RMSprop": "lr={lr}",
    "NAdam": "lr={lr}",
    "Adamax": "lr={lr}",
}
# Of these the rate follows the optimizer's steps, of which there are so many in all.
BY_STEP = {
    "OneCycleLR": "OneCycleLR(optimizer, {lr}, {steps} + 1, cycle_momentum=False)",
    "LambdaLR": "LambdaLR(optimizer, lambda i: min(1.0, (i + 1) / 10))",
    "CosineAnnealingLR": "CosineAnnealingLR(optimizer, {steps})",
    "CosineAnnealingWarmRestarts": "CosineAnnealingWarmRestarts(optimizer, 5)",
    "CyclicLR": "CyclicLR(optimizer, {lr} / 10, {lr}, 4, cycle_momentum=False)",
    "SequentialLR": "SequentialLR(optimizer, [LinearLR(optimizer, 0.1, 1.0, 5), "
    "CosineAnnealingLR(optimizer, {steps})], milestones=[5])",
    "ChainedScheduler": "ChainedScheduler([ConstantLR(optimizer, 0.1, 3), "
    "ExponentialLR(optimizer, 0.99)])",
}
BY_EPOCH = {
    "StepLR": "StepLR(optimizer, 1, 0.5)",
    "MultiStepLR": "MultiStepLR(optimizer, [1, 2])",
    "ExponentialLR": "ExponentialLR(optimizer, 0.9)",
    "PolynomialLR": "PolynomialLR(optimizer, {epochs})",
    "ReduceLROnPlateau": "ReduceLROnPlateau(optimizer, patience=0)",
}
LOADERS = ("nbdist", "nbdist, a part", "DistributedSampler")
ZEROING = ("after", "before", "model", "in place")
CLIPPING = ("", "norm", "value")
PRECISIONS = ("", "autocast", "layout", "fp16")
BETWEEN = ("", "evaluates", "rank 0 evaluates", "saves", "mean")
STOPS = ("", "in an epoch", "by the loss")
EXTRAS = ("", "average", "teacher", "other model", "two optimizers", "groups", "recomputes")
FROZEN = ("", "given", "left out")
CELLS = ("one", "goes on", "evaluated")


@dataclass(frozen=True, slots=True)
class Training:
    """What was drawn; each field is one of the names above. `accumulated`: backwards a step."""

    seed: int
    net: str
    layout: str
    optimizer: str
    schedule: str
    loader: str
    zeroing: str
    clipping: str
    precision: str
    between: str
    stop: str
    extra: str
    frozen: str
    cells: str
    width: int
    batch: int
    epochs: int
    accumulated: int

    @property
    def is_ddp(self) -> bool:
        """Whether torch's own DDP spreads it."""
        return self.layout == "DDP"

    @property
    def has_layout(self) -> bool:
        """Whether nbdist spreads it."""
        return self.layout not in ("DDP", "fully_shard")

    @property
    def is_whole(self) -> bool:
        """Whether each rank has all of its weights."""
        return self.layout in ("ddp", "zero1", "DDP")

    @property
    def samples(self) -> int:
        """How many an epoch has: with a remainder where no batch is taken in parts."""
        return 96 if self.accumulated > 1 else 92

    @property
    def steps(self) -> int:
        """How many steps of the optimizer all epochs have."""
        return self.epochs * -(-self.samples // self.batch)

    @property
    def rate(self) -> float:
        """The learning rate: larger with a larger batch."""
        return 0.001 * self.batch


def draw(seed: int) -> Training:
    """Return the training of a seed."""
    drawn = random.Random(seed)
    layout = drawn.choice(LAYOUTS)
    net = "cut" if layout == "tp=2" else drawn.choice(list(NETS))
    is_whole = layout in ("ddp", "zero1", "DDP")
    extra = drawn.choice(EXTRAS)
    if (extra == "average" and not is_whole) or (extra != "" and layout == "zero1"):
        extra = ""  # copies of shards, and an optimizer that is the layout's to make
    if extra == "recomputes" and net in ("batch norm", "convolution"):
        extra = ""  # statistics would count each batch twice, the second time after they are shared
    precision = drawn.choice(PRECISIONS)
    if precision == "layout" and layout in ("DDP", "fully_shard"):
        precision = "autocast"
    # A scaler's steps are its own to leave out, and float16 has few numbers for a norm.
    if precision == "fp16" and layout not in ("ddp", "DDP"):
        precision = ""
    if precision == "fp16" and ("norm" in net or extra in ("other model", "two optimizers")):
        net, extra = "dropout", ""
    schedule = drawn.choice(["", *BY_STEP, *BY_EPOCH])
    if precision == "fp16" or extra == "two optimizers":
        schedule = ""
    frozen = drawn.choice(FROZEN) if net != "cut" and is_whole and layout != "zero1" else ""
    clipping = drawn.choice(CLIPPING)
    if precision == "fp16" or (layout in ("zero2", "zero3", "tp=2") and clipping == "value"):
        clipping = ""
    between = drawn.choice(BETWEEN)
    if between == "rank 0 evaluates" and not is_whole:
        between = "evaluates"
    # A pass over a loader of nbdist that has ended early goes on where it was.
    loader = drawn.choice(LOADERS) if layout != "tp=2" else "nbdist"
    stop = drawn.choice(STOPS)
    cells = drawn.choice(CELLS)
    if stop == "in an epoch" and schedule in BY_STEP:
        stop = ""
    return Training(
        seed=seed,
        net=net,
        layout=layout,
        optimizer=drawn.choice(list(OPTIMIZERS)),
        schedule=schedule,
        loader=loader,
        zeroing=drawn.choice(ZEROING),
        clipping=clipping,
        precision=precision,
        between=between,
        stop=stop,
        extra=extra,
        frozen=frozen,
        cells=cells,
        width=2 * drawn.randint(4, 40),
        batch=drawn.choice((8, 16, 24)),
        epochs=drawn.randint(1, 4),
        accumulated=drawn.choice((1, 1, 2)) if precision != "fp16" and extra == "" else 1,
    )


def cells(one: Training) -> list[str]:
    """Return the cells of a training, in order."""
    made = "\n".join([_BEGIN, *_model(one), *_data(one), *_optimizer(one), *_schedule(one)])
    loop = _loop(one)
    match one.cells:
        case "goes on":
            return [made, loop, loop]
        case "evaluated":
            # Not the model as the last value: `Out` would keep it, and its layout, alive.
            return [f"{made}\n{loop}", f"{_JUDGE.format(model='model')}\njudged"]
    return [f"{made}\n{loop}"]


_BEGIN = """import contextlib, copy
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import *
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset, random_split"""

_RECOMPUTED = """class Recomputed(nn.Sequential):
    def forward(self, x):
        for one in self:
            x = torch.utils.checkpoint.checkpoint(one, x, use_reentrant=False)
        return x"""

_JUDGE = """{model}.eval()
with torch.no_grad():
    judged = F.cross_entropy({model}(held_out), targets).item()
{model}.train()"""


def _model(one: Training) -> list[str]:
    net = NETS[one.net].format(w=one.width)
    lines = [f"torch.manual_seed({one.seed})", f"net = nn.Sequential({net})"]
    if one.frozen:
        lines.append(
            "net[0].requires_grad_(False)"
            if one.net != "convolution"
            else "net[1].requires_grad_(False)"
        )
    if one.extra == "recomputes":
        lines = [_RECOMPUTED, *lines, "net = Recomputed(*net)"]
    if one.extra == "teacher":
        lines.append("teacher = copy.deepcopy(net).eval().requires_grad_(False)")
    if one.extra == "other model":
        lines.append(f"other = nn.Sequential(nn.Linear(6, {one.width}), nn.Linear({one.width}, 3))")
    lines += _spread(one, "net", "model")
    if one.extra == "other model":
        lines += _spread(one, "other", "other") if one.layout != "tp=2" else []
    if one.extra == "average":
        lines.append("average = torch.optim.swa_utils.AveragedModel(net)")
    # Ranks with samples of their own drop on their own; those of tp together.
    own = "" if one.layout == "tp=2" else " + rank"
    return [*lines, f"torch.manual_seed({one.seed} + 1{own})"]


def _spread(one: Training, net: str, name: str) -> list[str]:
    if one.is_ddp:
        return [f"{name} = DistributedDataParallel({net})"]
    if one.layout == "fully_shard":
        return [f"{name} = torch.distributed.fsdp.fully_shard({net})"]
    policies = ', nbdist.Precision("bf16")' if one.precision == "layout" else ""
    layout = f"layout = nbdist.parallelize({net}, {one.layout!r}{policies})"
    return [f"other_{layout}" if name == "other" else layout, f"{name} = {net}"]


def _data(one: Training) -> list[str]:
    lines = [
        "drawn = torch.Generator().manual_seed(0)",
        f"x = torch.randn({one.samples} + 20, 6, generator=drawn)",
        "y = x[:, :3].argmax(1)",
        f"held_out, targets = x[{one.samples}:], y[{one.samples}:]",
        f"data = TensorDataset(x[:{one.samples}], y[:{one.samples}])",
    ]
    if one.loader == "nbdist":
        return [*lines, f"loader = nbdist.loader(data, global_batch={one.batch})"]
    part = f"random_split(TensorDataset(x, y), [{one.samples}, 20], drawn)"
    if one.loader == "nbdist, a part":
        return [
            *lines,
            f"data, _ = {part}",
            f"loader = nbdist.loader(data, global_batch={one.batch})",
        ]
    return [
        *lines,
        "sampler, epoch = DistributedSampler(data), 0",
        f"loader = DataLoader(data, batch_size={one.batch // 2}, sampler=sampler)",
    ]


def _optimizer(one: Training) -> list[str]:
    kind, options = one.optimizer.split()[0], OPTIMIZERS[one.optimizer].format(lr=one.rate)
    if one.layout == "zero1":
        return [f"optimizer = layout.optimizer(torch.optim.{kind}, {options})"]
    given = "model.parameters()"
    if one.frozen == "left out":
        given = "[p for p in model.parameters() if p.requires_grad]"
    lines = []
    if one.extra == "two optimizers":
        given = "[p for n, p in model.named_parameters() if 'bias' not in n]"
        biases = "[p for n, p in model.named_parameters() if 'bias' in n]"
        lines.append(f"second = torch.optim.SGD({biases}, lr={one.rate})")
    if one.extra == "groups":
        given = (
            "[{'params': [p for p in model.parameters() if p.ndim > 1]}, "
            f"{{'params': [p for p in model.parameters() if p.ndim < 2], 'lr': {one.rate / 2}}}]"
        )
    if one.extra == "other model" and one.layout != "tp=2":
        lines.append(f"second = torch.optim.SGD(other.parameters(), lr={one.rate})")
    if one.precision == "fp16":
        lines.append("scaler = torch.amp.GradScaler('cpu', init_scale=256.0)")
    return [f"optimizer = torch.optim.{kind}({given}, {options})", *lines]


def _schedule(one: Training) -> list[str]:
    kind = (BY_STEP | BY_EPOCH).get(one.schedule)
    if kind is None:
        return []
    twice = 2 if one.cells == "goes on" else 1
    given = {"lr": one.rate, "steps": twice * one.steps, "epochs": twice * one.epochs}
    return [f"schedule = {kind.format(**given)}"]


def _loop(one: Training) -> str:
    body = "\n".join(_step(one))
    lines = ["step, stopped = 0, False", f"for _ in range({one.epochs}):"]
    if one.loader == "DistributedSampler":
        lines += ["    sampler.set_epoch(epoch)", "    epoch += 1"]
    lines += ["    for x, y in loader:", indent(body, "        ")]
    if one.stop == "in an epoch":
        lines += [
            "        step += 1",
            "        if step == 15:",
            "            stopped = True",
            "            break",
        ]
    lines += [indent(line, "    ") for line in _between(one)]
    if one.schedule in BY_EPOCH:
        told = "nbdist.mean(loss.detach(), len(x))" if one.schedule == "ReduceLROnPlateau" else ""
        lines.append(f"    schedule.step({told})")
    if one.stop == "by the loss":
        lines += ["    if nbdist.mean(loss.detach(), len(x)) < 0.7:", "        break"]
    if one.stop == "in an epoch":
        lines += ["    if stopped:", "        break"]
    return "\n".join(lines)


def _step(one: Training) -> list[str]:
    zero = {
        "after": "optimizer.zero_grad()",
        "before": "optimizer.zero_grad()",
        "model": "model.zero_grad()",
        "in place": "optimizer.zero_grad(set_to_none=False)",
    }[one.zeroing]
    has_second = one.extra == "two optimizers" or (
        one.extra == "other model" and one.layout != "tp=2"
    )
    zeros = [zero, *(["second.zero_grad()"] if has_second else [])]
    first = zeros if one.zeroing == "before" else []
    last = [] if one.zeroing == "before" else zeros
    return [*first, *_backwards(one), *_clipped(one), *_stepped(one, has_second), *last]


def _backwards(one: Training) -> list[str]:
    k = one.accumulated
    x, y = ("x", "y") if k == 1 else (f"x[part::{k}]", f"y[part::{k}]")
    loss = f"F.cross_entropy(model({x}), {y})"
    if one.extra == "teacher":
        loss += f" + F.mse_loss(model({x}), teacher({x}))"
    if k > 1:
        loss = f"{loss} / {k}"
    lines = [f"loss = {loss}"]
    if one.precision in ("autocast", "fp16"):
        dtype = "bfloat16" if one.precision == "autocast" else "float16"
        lines = [f"with torch.autocast('cpu', torch.{dtype}):", f"    loss = {loss}"]
    lines.append("scaler.scale(loss).backward()" if one.precision == "fp16" else "loss.backward()")
    if one.extra == "other model" and one.layout != "tp=2":
        lines.append("F.cross_entropy(other(x), y).backward()")
    if k == 1:
        return lines
    if one.has_layout:
        return [f"for part in layout.accumulate({k}):", *(indent(line, "    ") for line in lines)]
    if one.is_ddp:
        inner = [
            f"with contextlib.nullcontext() if part == {k - 1} else model.no_sync():",
            *(indent(line, "    ") for line in lines),
        ]
    else:
        inner = [f"model.set_requires_gradient_sync(part == {k - 1})", *lines]
    return [f"for part in range({k}):", *(indent(line, "    ") for line in inner)]


def _clipped(one: Training) -> list[str]:
    if one.clipping == "norm" and one.has_layout:
        return ["layout.clip_grad_norm_(1.0)"]
    if one.clipping == "norm":
        return ["nn.utils.clip_grad_norm_(model.parameters(), 1.0)"]
    return ["nn.utils.clip_grad_value_(model.parameters(), 0.5)"] if one.clipping else []


def _stepped(one: Training, has_second: bool) -> list[str]:
    if one.precision == "fp16":
        return ["scaler.step(optimizer)", "scaler.update()"]
    lines = ["optimizer.step()", *(["second.step()"] if has_second else [])]
    if one.schedule in BY_STEP:
        lines.append("schedule.step()")
    if one.extra == "average":
        lines.append("average.update_parameters(net)")
    return lines


def _between(one: Training) -> list[str]:
    match one.between:
        case "evaluates":
            return [_JUDGE.format(model="model")]
        case "rank 0 evaluates":
            inner = "model.module" if one.is_ddp else "model"
            return ["if rank == 0:", indent(_JUDGE.format(model=inner), "    "), "model.train()"]
        case "saves" if one.is_whole:
            return ["kept = copy.deepcopy(net.state_dict()) if rank == 0 else None"]
        case "mean":
            return ["print(nbdist.mean(loss.detach(), len(x)))"]
    return []


def values_of(trainings: Sequence[Training]) -> dict[str, set[object]]:
    """Return what was drawn of each field."""
    return {f.name: {getattr(one, f.name) for one in trainings} for f in fields(Training)}
