"""What a trial is made of, as plain values: models, faults, and what is done. Pure: no torch."""

from dataclasses import dataclass

from tests.random.layouts import LAYOUTS, Layout

OPTIMIZERS = ("sgd", "momentum", "adam")
DATA = ("index", "schedule", "loader")  # what tells a loop where it is
STYLES = ("apart", "guarded", "together")  # where the model is made: see `cells.train`
AGAIN = ("", "%dist retry", "by hand")  # how a cell that has failed is run again
STEPS_OF_EPOCH = 5
GLOBAL_BATCH = 12

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
        """Whether a scheduler changes its learning rate at each step."""
        return self.data == "schedule"

    @property
    def spread(self) -> Layout:
        """How it is spread."""
        return LAYOUTS[self.layout]


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
    """Train models in turn. `retry` is the cell's; `again`: what follows when it failed.

    `noise` seeds torch's, numpy's and Python's generators, from which each step draws; 0: none.
    """

    names: tuple[str, ...]
    steps: int
    fault: Fault = NO_FAULT
    retry: int = 0
    again: str = ""
    style: str = "apart"
    model: Model | None = None  # of the styles that make it
    noise: int = 0


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
    """A fresh session of `n` ranks, and what is done in it; `static`: with NBDIST_STATIC=1."""

    seed: int
    n: int
    acts: tuple[Act, ...]
    static: bool = False


def whole_epochs(steps: int) -> int:
    """Return the steps of as many whole epochs as hold `steps`."""
    return -(-steps // STEPS_OF_EPOCH) * STEPS_OF_EPOCH
