"""What a trial does, from its seed: models, cells and faults as plain values. Pure: no torch.

The same seed gives the same trial on every machine; only the moments at which faults from outside
strike differ from run to run. What a trial does depends on nothing that it meets: what cannot be
done any more (a model that was lost) is made again first, see `world`.
"""

import random
from dataclasses import replace

from tests.random.acts import (
    DEADLY,
    FAULTS,
    OPTIMIZERS,
    SITES,
    STYLES,
    Act,
    Drop,
    Fault,
    Group,
    Idle,
    Keep,
    Make,
    Message,
    Model,
    Push,
    Restart,
    Scale,
    Set,
    Sum,
    Train,
    Trial,
    whole_epochs,
)
from tests.random.layouts import ARCHITECTURES, LAYOUTS, fitting

# What a trial does next, and how often it is drawn.
_NEXT = {
    "train": 10,
    "made in it": 3,
    "make": 2,
    "keep": 2,
    "drop": 1,
    "group": 2,
    "sum": 3,
    "set": 1,
    "idle": 2,
    "message": 1,
    "restart": 1.7,
    "scale": 1.1,
    "push": 0.6,
}


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
        # Loaders cut batches as the newest layout says: beside them all cut alike.
        self._has_loaders = self._random.random() < 0.7
        self._share = ""

    def trial(self) -> Trial:
        acts: list[Act] = []
        if self._random.random() < 0.4:
            acts.append(Set("varied", self._random.randint(2, 9)))
        acts += self._begin()
        for _ in range(self._random.randint(2, 6)):
            acts += self._next()
        return Trial(self._seed, self._begun_with, tuple(acts), self._random.random() < 0.2)

    def _begin(self) -> list[Act]:
        """One model in a cell of its own, most often; or several; or one that a cell trains too."""
        draw = self._random.random()
        if draw < 0.45:
            return [*self._make(1), self._train()]
        if draw < 0.75:
            return [*self._make(self._random.choice((2, 2, 3))), self._train()]
        return [self._train_what_it_makes()]

    def _next(self) -> list[Act]:
        chosen = self._random.choices(list(_NEXT), list(_NEXT.values()))[0]
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
                self._share = "rank"  # what was cut otherwise is made again as "zero3"
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
        if old.layout not in fitting(self._n, without=lambda name: False):
            return []  # the number of ranks has changed since
        self._count += 1
        new = replace(old, seed=self._count)
        self._models[new.name] = new
        return [Make((new,)), self._train(names=(new.name,))]

    def _model(self, data: str | None = None) -> Model:
        def is_out(name: str) -> bool:
            cuts_otherwise = self._share not in ("", LAYOUTS[name].share)
            is_group = name == "DDP on a group"
            return (self._has_loaders and cuts_otherwise) or (
                is_group and (self._n == 2 or data is not None)
            )

        layouts = fitting(self._n, without=is_out)
        layout = self._random.choices(list(layouts), list(layouts.values()))[0]
        usual = self._usual if self._random.random() < 0.7 else None
        architecture = usual or self._random.choice(ARCHITECTURES)
        if architecture not in LAYOUTS[layout].architectures:
            architecture = self._random.choice(LAYOUTS[layout].architectures)
        # Adam makes large steps of gradients that are nought but for rounding, as before a norm.
        optimizers = OPTIMIZERS[:2] if architecture == "batchnorm" else OPTIMIZERS
        self._share = LAYOUTS[layout].share
        kinds = ["index", "loader"] if self._has_loaders else ["index"]
        if not LAYOUTS[layout].is_split:
            kinds.append("schedule")
        group = None
        if layout == "DDP on a group":
            group = self._random.choice([*self._groups, f"g{len(self._groups)}"])
            kinds = [kind for kind in kinds if kind != "loader"]
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
        retry, again = self._random.choice(((0, ""), (0, ""), (2, ""), (0, "%dist retry")))
        noise = 0
        # A rank that dies takes its random numbers with it, and dropout seeds its own; a part of a
        # model may go back to a step before the cell.
        spread = models[0].spread
        is_drawn = fault.kind not in DEADLY and models[0].architecture != "dropout"
        is_drawn = is_drawn and not (spread.is_sharded or spread.is_split)
        if not again and len(models) == 1 and is_drawn:
            noise = self._random.choice((0, 0, self._random.randint(1, 999)))
        if again and models[0].data != "loader":
            again = self._random.choice((again, "by hand"))
        return Train(names, steps, fault, retry, again, noise=noise)

    def _train_what_it_makes(self) -> Train:
        style = self._random.choice(STYLES[1:])
        kinds = ("loader", "loader", "index") if self._has_loaders else ("index",)
        model = self._model(self._random.choice(kinds))
        if model.group is not None:
            raise AssertionError("such models need a group, which is made before")
        # As data by its index starts over, so does the count: only made together is it right.
        if model.data == "index":
            style = "together"
        self._models[model.name] = model
        steps = self._random.choice((3, 5, 8, 20))
        fault = self._fault(self._steps_of([model], steps))
        retry, again = self._random.choice(((2, ""), (2, ""), (0, "%dist retry")))
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
