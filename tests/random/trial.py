"""What a trial does, from its seed: models, cells and faults as plain values. Pure: no torch.

The same seed gives the same trial on every machine; only the moments at which faults from outside
strike differ from run to run. What a trial does depends on nothing that it meets: what cannot be
done any more (a model that was lost) is made again first, see `drive`.
"""

import random
from dataclasses import dataclass

ARCHITECTURES = ("linear", "mlp", "batchnorm", "dropout")
OPTIMIZERS = ("sgd", "momentum", "adam")

# How a model is spread, and how often it is drawn. The words of `parallelize`, and torch's own.
LAYOUTS = {
    "ddp": 6,
    "zero1": 3,
    "zero2": 1,
    "zero3": 2,
    "dp=2 fsdp=2": 2,  # on four ranks
    "DDP": 3,
    "DDP on a group": 2,  # on three ranks or more
    "fully_shard": 1,
    "DDP and ZeRO": 2,
}
SHARDED = {"zero2", "zero3", "dp=2 fsdp=2", "fully_shard"}
SPLIT_STATES = {"zero1", "DDP and ZeRO"}  # each rank has the model, and a part of the states

# What strikes, and how often it is drawn.
FAULTS = {
    "none": 3,
    "raise": 6,
    "sys.exit": 1,
    "KeyboardInterrupt": 1,
    "SIGKILL": 6,
    "SIGSEGV": 2,
    "SIGABRT": 1,
    "os._exit(0)": 1,
    "os._exit(9)": 1,
    "two ranks killed": 2,
    "second in the repair": 2,
    "killed from outside": 3,
    "interrupt": 3,
    "interrupt a hang": 1,
    "mismatch": 2,
    "leaves early": 2,
    "SIGSTOP, SIGCONT": 1,
}
DEADLY = {
    "SIGKILL",
    "SIGSEGV",
    "SIGABRT",
    "os._exit(0)",
    "os._exit(9)",
    "two ranks killed",
    "second in the repair",
    "killed from outside",
}
SITES = ("before forward", "before backward", "in backward", "before step", "after step")
DATA = ("index", "schedule", "loader")  # what tells a loop where it is
STYLES = ("apart", "guarded", "together")  # where the model is made: see `cells.train`
STEPS_OF_EPOCH = 5
GLOBAL_BATCH = 12


@dataclass(frozen=True, slots=True)
class Model:
    """A model, its optimizer and its data. `group` names the group it is on; None: all ranks."""

    name: str
    architecture: str
    layout: str
    optimizer: str
    data: str
    seed: int
    group: str | None = None

    @property
    def has_schedule(self) -> bool:
        """Whether a scheduler halves its learning rate every third step."""
        return self.data == "schedule"


@dataclass(frozen=True, slots=True)
class Fault:
    """What strikes in a cell, where, and on which ranks; `delay_s` of those from outside."""

    kind: str
    ranks: tuple[int, ...] = ()
    site: str = SITES[0]
    step: int = 0
    second: int | None = None
    delay_s: float = 0.0


NO_FAULT = Fault("none")


@dataclass(frozen=True, slots=True)
class Make:
    """Make models, in a cell of their own."""

    models: tuple[Model, ...]


@dataclass(frozen=True, slots=True)
class Train:
    """Train models in turn. `retry` is the cell's; `again`: the session's, when it failed."""

    names: tuple[str, ...]
    steps: int
    fault: Fault = NO_FAULT
    retry: int = 0
    again: bool = False
    style: str = "apart"
    model: Model | None = None  # of the styles that make it


@dataclass(frozen=True, slots=True)
class Keep:
    """Ranks keep a second name for a model, as in `best = model`."""

    name: str
    of: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Drop:
    """Ranks delete a model's names."""

    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """Make a group of ranks."""

    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sum:
    """all_reduce over a group, or over all ranks, with a fault before it."""

    group: str | None
    fault: Fault = NO_FAULT


@dataclass(frozen=True, slots=True)
class Set:
    """A variable that is another one on each rank."""

    name: str
    factor: int


@dataclass(frozen=True, slots=True)
class Idle:
    """Ranks are killed while no cell runs."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Restart:
    """New processes for living ranks."""

    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Scale:
    """Another number of ranks."""

    n: int


@dataclass(frozen=True, slots=True)
class Push:
    """A value to all ranks, and back."""

    name: str
    value: int


@dataclass(frozen=True, slots=True)
class Message:
    """`sender` sends numbers to `receiver`, which has room for as many, or for others."""

    sender: int
    receiver: int
    sent: int
    room: int


Act = Message | Make | Train | Keep | Drop | Group | Sum | Set | Idle | Restart | Scale | Push


@dataclass(frozen=True, slots=True)
class Trial:
    """A fresh session of `n` ranks, and what is done in it."""

    seed: int
    n: int
    acts: tuple[Act, ...]


def draw(seed: int) -> Trial:
    """Return the trial of a seed."""
    return _Drawing(seed).trial()


class _Drawing:
    """One trial while it is drawn: what there is so far."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._random = random.Random(seed)
        self._n = self._random.choice((2, 2, 3, 3, 4))
        self._begun_with = self._n
        self._models: dict[str, Model] = {}
        self._groups: dict[str, tuple[int, ...]] = {}
        self._count = 0
        self._kept = 0
        # Models that look alike are what is easily mistaken for one another.
        self._usual = self._random.choice(ARCHITECTURES)

    def trial(self) -> Trial:
        acts: list[Act] = []
        if self._random.random() < 0.4:
            acts.append(Set("varied", self._random.randint(2, 9)))
        acts += self._begin()
        for _ in range(self._random.randint(2, 6)):
            acts += self._next()
        return Trial(self._seed, self._begun_with, tuple(acts))

    def _begin(self) -> list[Act]:
        """One model in a cell of its own, most often; or several; or one that a cell trains too."""
        draw = self._random.random()
        if draw < 0.45:
            return [*self._make(1), self._train()]
        if draw < 0.75:
            return [*self._make(self._random.choice((2, 2, 3))), self._train()]
        return [self._train_what_it_makes()]

    def _next(self) -> list[Act]:
        chosen = self._random.choices(
            (
                "train",
                "made in it",
                "make",
                "keep",
                "drop",
                "group",
                "sum",
                "set",
                "idle",
                "message",
            ),
            (10, 3, 2, 2, 1, 2, 3, 1, 2, 1),
        )[0]
        chosen = self._random.choices((chosen, "restart", "scale", "push"), (20, 1.5, 1, 0.5))[0]
        match chosen:
            case "train" if self._models:
                return [self._train()]
            case "made in it":
                return [self._train_what_it_makes()]
            case "make":
                return self._make(1)
            case "keep" if self._models:
                return [self._keep(), *self._make_again()]
            case "drop" if len(self._models) > 1:
                return [Drop(self._a_model(), self._some(1))]
            case "group" if self._n > 2:
                return [self._group()]
            case "idle":
                return [Idle(self._some(self._random.choice((1, 1, self._n - 1))))]
            case "restart":
                return [Restart(self._some(1))]
            case "scale":
                self._n = self._random.choice([n for n in (2, 3, 4) if n != self._n])
                self._groups.clear()
                return [Scale(self._n)]
            case "push":
                return [Push("pushed", self._random.randint(1, 99))]
            case "message":
                sender, receiver = self._random.sample(range(self._n), 2)
                sent = self._random.choice((3, 9))
                return [Message(sender, receiver, sent, self._random.choice((sent, 4)))]
            case "set":
                return [Set("varied", self._random.randint(2, 9))]
        group = self._random.choice([None, *self._groups])
        ranks = self._groups.get(group) if group else None
        return [Sum(group, self._fault(1, members=ranks))]

    def _make(self, count: int) -> list[Act]:
        acts: list[Act] = []
        models = []
        for _ in range(count):
            model = self._model()
            if model.group is not None and model.group not in self._groups:
                acts.append(self._group(model.group))
            models.append(model)
        for model in models:
            self._models[model.name] = model
        return [*acts, Make(tuple(models))]

    def _make_again(self) -> list[Act]:
        """Make a model anew under its name: what `keep` has kept stays where it was kept."""
        if self._random.random() < 0.3:
            return []
        old = self._models[self._a_model()]
        self._count += 1
        new = Model(
            old.name, old.architecture, old.layout, old.optimizer, old.data, self._count, old.group
        )
        self._models[new.name] = new
        return [Make((new,)), self._train(names=(new.name,))]

    def _model(self, data: str | None = None) -> Model:
        layouts = {
            name: weight
            for name, weight in LAYOUTS.items()
            if (name != "dp=2 fsdp=2" or self._n == 4)
            and (name != "DDP on a group" or (self._n > 2 and data is None))
        }
        layout = self._random.choices(list(layouts), list(layouts.values()))[0]
        usual = self._usual if self._random.random() < 0.7 else None
        architecture = usual or self._random.choice(ARCHITECTURES)
        # Adam makes large steps of gradients that are nought but for rounding, as before a norm.
        optimizers = OPTIMIZERS[:2] if architecture == "batchnorm" else OPTIMIZERS
        kinds = ["index", "loader"]
        if layout not in SPLIT_STATES:
            kinds.append("schedule")
        group = None
        if layout == "DDP on a group":
            group = self._random.choice([*self._groups, f"g{len(self._groups)}"])
            kinds.remove("loader")
        self._count += 1
        return Model(
            f"m{self._count}",
            architecture,
            layout,
            self._random.choice(optimizers),
            data or self._random.choice(kinds),
            self._count,
            group,
        )

    def _group(self, name: str | None = None) -> Group:
        name = name or f"g{len(self._groups)}"
        ranks = tuple(sorted(self._random.sample(range(self._n), 2)))
        self._groups[name] = ranks
        return Group(name, ranks)

    def _keep(self) -> Keep:
        everyone = tuple(range(self._n))
        ranks = self._random.choice([(0,), (0,), self._some(1), everyone])
        self._kept += 1
        return Keep(f"best{self._kept}", self._a_model(), ranks)

    def _train(self, names: tuple[str, ...] | None = None) -> Train:
        if names is None:
            names = (self._a_model(),)
            if len(self._models) > 1 and self._random.random() < 0.25:
                group = self._models[names[0]].group
                alike = [m for m in self._models.values() if m.data == "index" and m.group == group]
                if len(alike) > 1:
                    names = tuple(m.name for m in self._random.sample(alike, 2))
        models = [self._models[name] for name in names]
        steps = self._random.choice((1, 2, 3, 5, 8, 40))
        groups = {self._groups.get(m.group) for m in models if m.group}
        members = groups.pop() if groups else None
        fault = self._fault(self._steps_of(models, steps), members=members)
        retry, again = self._random.choice(((0, False), (0, False), (2, False), (0, True)))
        return Train(names, steps, fault, retry, again)

    def _train_what_it_makes(self) -> Train:
        style = self._random.choice(STYLES[1:])
        model = self._model(self._random.choice(("loader", "loader", "index")))
        if model.group is not None:
            raise AssertionError("such models need a group, which is made before")
        # As data by its index starts over, so does the count: only made together is it right.
        if model.data == "index":
            style = "together"
        self._models[model.name] = model
        steps = self._random.choice((3, 5, 8, 20))
        fault = self._fault(self._steps_of([model], steps))
        retry, again = self._random.choice(((2, False), (2, False), (0, True)))
        return Train((model.name,), steps, fault, retry, again, style, model)

    def _steps_of(self, models: list[Model], steps: int) -> int:
        """Return how many steps a training makes that is asked for `steps`: whole epochs."""
        return whole_epochs(steps) if models[0].data == "loader" else steps

    def _fault(self, steps: int, members: tuple[int, ...] | None = None) -> Fault:
        kind = self._random.choices(list(FAULTS), list(FAULTS.values()))[0]
        among = list(members or range(self._n))
        count = 1
        if kind == "two ranks killed":
            count = 2 if self._n > 2 else 1
        ranks = tuple(sorted(self._random.sample(among, min(count, len(among)))))
        others = [rank for rank in range(self._n) if rank not in ranks]
        # One rank must live on, and hold what the others lose.
        second = self._random.choice(others) if kind == "second in the repair" else None
        if second is not None and self._n == 2:
            second = ranks[0]
        step = self._random.choice((0, 0, 1, 2, steps // 2, steps - 1))
        return Fault(
            kind,
            () if kind == "none" else ranks,
            self._random.choice(SITES),
            min(step, steps - 1),
            second,
            round(self._random.choice((0.0, 0.02, 0.1, 0.3)) * self._random.random(), 3),
        )

    def _a_model(self) -> str:
        return self._random.choice(list(self._models))

    def _some(self, count: int) -> tuple[int, ...]:
        count = max(1, min(count, self._n - 1))
        return tuple(sorted(self._random.sample(range(self._n), count)))


def whole_epochs(steps: int) -> int:
    """Return the steps of as many whole epochs as hold `steps`."""
    return -(-steps // STEPS_OF_EPOCH) * STEPS_OF_EPOCH
