"""The few plain values that cross between the notebook and the ranks.

Everything here is JSON on the wire: numbers, text, and lists and dicts of them. Tensors never
are; `push` and `pull` have raw buffers of their own.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from itertools import chain, groupby
from math import isfinite
from typing import Any

from nbdist.shared.packed import Calls, numbers_of, text_of

VERSION = 17  # rises when a message changes; both sides compare it at the start

RECORDS = "nbdist_records"  # iopub message type: one Batch
OUTPUT = "nbdist_output"  # iopub message type: text, see `engine/kernel/output/stdio.py`
REQUEST = "nbdist_request"  # shell (main thread) and control (any time) message types
REPLY = "nbdist_reply"
CELL_KEY = "nbdist"  # where a cell's message carries its CellStart, and the reply its CellEnd
PUBLISHED = "published"  # a fact: models that the cell has published, as JSON
# A fact: what was changed by hand, as JSON of a list of the fields of `metrics/changes.Change`.
CHANGES = "changes"
LEFT_OUT = "left_out"  # as it is logged at a step that a guard leaves out: how many by then
MOST_LEFT_OUT = 4  # of these steps, the newest: what a rank keeps to look into
CONTINUES = (
    "continues"  # a fact of a cell that is run again: it trains on what is there, or restored
)
# A fact of a cell that trains: the steps that its first optimizer had made before. A training that
# goes on from a checkpoint makes the steps after it again.
TRAINED_BEFORE = "trained_before"
# A fact: the folder in `.nbdist/numerics` that has what the steps of the cell have computed.
NUMERICS = "numerics"
# What each rank finds in its namespace, of its own or put there by us: nothing else sets them.
NAMES_OF_A_RANK = frozenset(
    {"rank", "local_rank", "world_size", "device", "torch", "dist", "nbdist"},
)
# A fact: the device and link that a rank stands for, as people read it. Also the kind of a row: at
# a cell's end the seconds its operations take there, `virtual_s`, and by how many they were late
# here, `late_s`.
EMULATED = "emulated"
STAGES = "stages"  # a kind of row, of a step with pp now and then: see `stage_values`
# The iopub messages that show something: a detached cluster's ranks keep them (`journal.py`).
SHOWN = frozenset({OUTPUT, "display_data", "execute_result", "update_display_data", "clear_output"})
SILENT_KEY = "nbdist_silent"  # true in the reply of a cell that has sent nothing on iopub


# What the values of a step's record may be called, and `step` itself; see Record.
STEP_KEYS = frozenset(
    {
        *("step", "loss", "step_s", "compute_s", "comm_s", "comm_total_s", "data_s"),
        *("forward_s", "forward_comm_s", "backward_s", "optimizer_s", "other_s"),
        *("cpu_s", "starved_s"),
        *("read_s", "decode_s", "transform_s", "fetch_s", "collate_s", "copy_s"),
        *("making_cpu_s", "batches", "loader"),
        *("samples", "tokens", "bytes", "collectives", "replays", "total", "epoch_began"),
        "training_began",
        *("expert_tokens", "expert_even"),
        *("rss_bytes", "cuda_bytes", "cuda_reserved_bytes", "cuda_peak_bytes", "grad_share"),
    }
)

# What the values of a device's record may be called; see Record.
DEVICE_KEYS = frozenset(
    {
        *("cpu_pct", "resident_bytes", "allocated_bytes", "reserved_bytes", "peak_bytes"),
        *("device_pct", "device_bytes", "device_total_bytes", "device_c", "device_w"),
    }
)


def is_measured(values: Mapping[str, float]) -> bool:
    """Return whether a step's record says what the step is made of: see Record."""
    return "compute_s" in values or "comm_s" in values


def stage_values(
    kind: str, stage: int, micro_batch: int, began_s: float, ended_s: float
) -> dict[str, float]:
    """Return what a row of stages says of one micro-batch: seconds since 1970, by the rank's clock.

    `kind` is F (forward), B (backward) or W (of weights alone).
    """
    name = f"{kind} {stage} {micro_batch}"
    return {f"{name} began": began_s, f"{name} ended": ended_s}


CELL_END = 0  # the step of an "alike" row at the end of a cell, and of a "left" row

# What begins the names of an "alike" row of weights whose gradients the loop averages by itself;
# then comes the number of its "use" rows' optimizer.
BY_HAND = "hand "

# What torch's default dtype may be; a "left" row has places in it.
DEFAULT_DTYPES = ("float32", "float64", "bfloat16", "float16")

# The kinds that tell of training; the others only come with it, or with any communication.
RUN_KINDS = frozenset({"step", "log"})


# Those that a rank makes once in a while, whatever its cell does, or if it hangs.
KINDS_OF_ITSELF = frozenset({"device", "links"})


# Not frozen: that would treble what making one costs a step. Nobody changes one.
@dataclass(slots=True)
class Record:
    """One row of metrics.

    `kind` is "step" (one optimizer step, seen by the hooks), "log" (`nbdist.log`), "calls" (a
    step's collectives, in `detail`), "experts" (now and then, of a layout with ep), "links" (what
    the sockets to other ranks tell, see `engine/group/links/link_stats.py`), "device" (each second,
    of process and GPU), "optimizer" (one makes its first step in the cell), "loader" (a loop over
    one begins), "alike" or "use" (now and then: what must be equal on all ranks, and how a model is
    used, see `engine/checks`), "left" (at a cell's end: what it has left undone, or changed in the
    process), `EMULATED` or `STAGES`. `step` counts optimizer steps on this rank since the cell
    began, from 1; 0 before the first. `time_ns` is the rank's wall clock (`time.time_ns`) when the
    row was made. `values` holds plain floats. A step row has, where known: `loss`; `step_s`;
    `samples`, `tokens`, `bytes` (sent into collectives), `collectives` (a count); `replays` (of
    CUDA graphs, a count: of a step that is one, what it is made of and sends is not known);
    `grad_share`, this rank's share of the squared
    gradient norm, where that is asked for: the norm is the root of the sum over all ranks.

    Of steps that are *measured* (all of them, or some of many short ones) it also has what the step
    is made of: `compute_s` (forward and backward), `comm_s` (exposed: the main thread waited),
    `data_s`, `optimizer_s`, `other_s`, which sum to it; of these `forward_s` and `backward_s` by
    the clock, waits for communication included, and `forward_comm_s`, what of `comm_s` fell into
    forward; `comm_total_s` (union of all collectives' intervals); `cpu_s` (processor time of the
    main thread) and `starved_s` (it was ready to run and had no core); of batches that an
    `nbdist.loader` gave, `batches` (a count), `loader` (its number) and what making them took, in
    workers too: `read_s`, `decode_s`, `transform_s`, `fetch_s`, `collate_s`, `copy_s` as
    `engine/data/making.py` defines them, and `making_cpu_s` (processor time of that); `total` (the
    step that ends
    the pass over the loader, when that knows its length) and, from the second pass on,
    `epoch_began` (the last step before it); now and then `rss_bytes`, `cuda_bytes` (allocated),
    `cuda_reserved_bytes`, `cuda_peak_bytes`. The first step of another training in the cell has
    `training_began`, its number, from 2: its optimizer was made since the step before, and what it
    trains has not been trained in the cell.

    A loader row tells of an `nbdist.loader` when a loop over it begins: `loader` (its number),
    `order` (a number of what decides its batches: the same on all ranks), `prompt` and `line` (of
    the cell that made it; 0 where not known), `workers`, `pinned` and `persistent` (0 or 1),
    `cores` (that this rank may use, its share where several ranks are on the machine).

    Under ep a step row has `expert_tokens`, how many tokens came to this rank's experts in forwards
    that train, added up over mixtures (a token counts once for each of its experts), and
    `expert_even`, how many that were, had all ranks of ep as many. An experts row has the tokens of
    one step, of each expert of this rank, by "MIXTURE:EXPERT": the module and the expert's number.

    An "alike" row holds fingerprints by name and part of a tensor. That of a cell's end (step
    `CELL_END`) has "MODEL:" before each name, or "MODEL|RANKS:" where not all ranks hold it.

    A use row is one optimizer's: what `engine/checks/use` observes, with what the step as a whole
    is, such as `counted` and `each` of `engine/checks/means`.

    A left row has `backwards`, after which none of the cell's optimizers has stepped; or what is
    changed for the next cells: `dtype` and `dtype_before` (places in `DEFAULT_DTYPES`), and 1 for
    `gc_off`, `grad_off`, `anomaly_on`, `stdout_lost` and `stderr_lost` (what replaces the stream
    does not lead to it), with `script`, whether the cell is one.

    A links row has for each connection that carried much since the rank's row before, also where
    several lead to one rank: `PEER@CALLER.sent_bytes` (that the other end has), `.busy_s` (there
    was something to send, or to be acknowledged, and the other end had room for it),
    `.resent_bytes`, and `.rtt_s` (the round trip now, smoothed). CALLER is the address of the end
    that called, the same at both; PEER the other's rank where this end called, else nothing: who
    was called learns from no address who that is, and the notebook does.

    A device row has `cpu_pct` (processor time of all threads of the process since the row before,
    100 is one core) and `resident_bytes`; of a GPU that it uses, what torch's allocator holds in
    this process (`allocated_bytes`, `reserved_bytes`, and `peak_bytes`, the most that was
    allocated) of `device_total_bytes`, and where known `device_bytes` (in use by all programs),
    `device_pct` (of the time in which it computed anything), `device_c` (degrees Celsius) and
    `device_w` (watts).

    An optimizer row has `lr` (the rate that its schedule, if any, is multiplied with), `tensors`
    and `numbers` (what it trains: a count of parameters, and of all their elements); `parts` (of
    a batch: ranks that differ in their samples), where a layout or DDP spreads the model;
    `scaled_for`, the batch for which `nbdist.scale_lr` scaled the rate.
    """

    rank: int
    seq: int
    kind: str
    step: int
    time_ns: int
    values: dict[str, float]
    detail: Calls | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """Records of one rank with consecutive `seq`, as they travel.

    `facts` are short texts about the run that changed since the last batch, such as
    `{"layout": "ddp", "model": "GPT", "parameters": "815872"}`; they become MLflow params.
    """

    rank: int
    records: tuple[Record, ...]
    facts: dict[str, str] = field(default_factory=dict)

    def to_wire(self) -> dict[str, Any]:
        """Return the JSON form: the first `seq`, and compact rows: equal forms share one."""
        first = self.records[0].seq if self.records else 0
        rows = [_row(list(same)) for _, same in groupby(self.records, _form)]
        return {"rank": self.rank, "first": first, "rows": rows, "facts": self.facts}

    @classmethod
    def from_wire(cls, content: dict[str, Any]) -> "Batch":
        """Return the batch that `to_wire` wrote."""
        rank, first = content["rank"], content["first"]
        values = chain.from_iterable(map(_values, content["rows"]))
        records = tuple(Record(rank, first + i, *fields) for i, fields in enumerate(values))
        return cls(rank, records, content["facts"])


def _form(record: Record) -> tuple[object, ...]:
    """Return what records that can share a row have in common."""
    alone = record.seq if record.detail is not None else None
    return record.kind, tuple(record.values), alone


def _row(records: Sequence[Record]) -> list[Any]:
    first = records[0]
    if first.detail is not None:
        values = _to_json(first.values)
        return [first.kind, first.step, first.time_ns, values, first.detail.to_wire()]
    if len(records) == 1:
        return [first.kind, first.step, first.time_ns, _to_json(first.values)]
    moments = array("q", [number for r in records for number in (r.step, r.time_ns)])
    numbers = array("d", [value for r in records for value in r.values.values()])
    return [first.kind, list(first.values), text_of(moments), text_of(numbers)]


def _values(row: list[Any]) -> Iterator[tuple[Any, ...]]:
    """Return kind, step, time, values and detail of the records in a row."""
    kind, step, time_ns, values, *detail = row
    if not isinstance(step, list):
        yield kind, step, time_ns, _from_json(values), *map(Calls.from_wire, detail)
        return
    keys, width = step, len(step)
    moments, numbers = numbers_of(time_ns, "q"), numbers_of(values, "d")
    for i in range(len(moments) // 2):
        of_one = dict(zip(keys, numbers[i * width : (i + 1) * width], strict=True))
        yield kind, moments[2 * i], moments[2 * i + 1], of_one


def _to_json(values: dict[str, float]) -> dict[str, float | str]:
    # JSON has no nan and no infinity, and a loss that has become one must be seen.
    return {key: v if isfinite(v) else repr(v) for key, v in values.items()}


def _from_json(values: dict[str, float | str]) -> dict[str, float]:
    return {key: float(v) for key, v in values.items()}


@dataclass(frozen=True, slots=True)
class Script:
    """The script that a cell is: its `file`, as the notebook has it, and its words, `argv`.

    `module` is its name where `-m` has called it by that, such as `pkg.__main__`.
    """

    file: str
    module: str = ""
    argv: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckpointEvery:
    """How a cell saves by itself: after every so many steps.

    `since` is when it was asked for, in seconds since 1970: older checkpoints are not its own.
    Ranks had died `faults` times in a session of `session_s` seconds when it was sent.
    """

    steps: int
    since: float
    faults: int = 0
    session_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ProfileSteps:
    """The steps of a cell that are recorded, from `first` to `last`, and the folder for them."""

    first: int
    last: int
    folder: str


class Repeat(StrEnum):
    """Whether a cell is the one that failed last, run again.

    A `RETRY` starts over where it makes its optimizers again, and continues where they were there
    before it. That is seen when one steps: where it had started over by then, it is run once more,
    to `CONTINUE`.
    """

    NO = "no"
    RETRY = "retry"
    CONTINUE = "continue"


@dataclass(frozen=True, slots=True)
class CellStart:
    """What a rank is told of a cell beside its code; rides in the metadata of its message.

    Attributes:
        number: Of what the session has run, from 1.
        ranks: Where it runs, ascending.
        prompt: The number that tracebacks give it.
        params: Set on the ranks before it runs; in the JSON form of `nbdist.shared.plain`.
        failed: The number of the cell that failed last and has not gone well since. Also ranks on
            which that ended well must remember how it is run again.
        repeat: Whether this is that cell, run again.
        is_changed: In another form: what it sets is meant, also where it was something else.
        profile: The steps to record.
        checkpoints: The folder of checkpoints that the cell gives no name; "" leaves it as it is.
        saves: How it saves by itself.
        call: A row of `CELLS` in `engine/kernel/ipython/calls.py`, to run instead of the code.
        arguments: Of that call.
        track: Whether a training in it is tracked.
        script: The script that it is.
        keep: Whether what it shows is kept, for a notebook that comes later.
        guard: Whether a step whose gradients are not finite is left out.
        evidence: The folder in which ranks keep what its steps were called with; "" for memory, of
            those that are left out alone.
    """

    number: int
    ranks: tuple[int, ...]
    prompt: int
    params: Mapping[str, Any] = field(default_factory=dict)
    failed: int | None = None
    repeat: Repeat = Repeat.NO
    is_changed: bool = False
    profile: ProfileSteps | None = None
    checkpoints: str = ""
    saves: CheckpointEvery | None = None
    call: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    track: bool = True
    script: Script | None = None
    keep: bool = False
    guard: bool = False
    evidence: str = ""

    def to_wire(self) -> dict[str, Any]:
        """Return the JSON form; not by `asdict`, for one is made for each rank."""
        parts = (self.profile, self.saves, self.script)
        profile, saves, script = (None if part is None else asdict(part) for part in parts)
        whole = {name: getattr(self, name) for name in self.__slots__}
        return whole | {"profile": profile, "saves": saves, "script": script}

    @classmethod
    def from_wire(cls, content: Mapping[str, Any]) -> "CellStart":
        """Return the start that a message carried."""
        profile, saves, script = (content[name] for name in ("profile", "saves", "script"))
        parts = {
            "ranks": tuple(content["ranks"]),
            "repeat": Repeat(content["repeat"]),
            "profile": profile and ProfileSteps(**profile),
            "saves": saves and CheckpointEvery(**saves),
            "script": script and Script(**script | {"argv": tuple(script["argv"])}),
        }
        return cls(**{**content, **parts})


@dataclass(frozen=True, slots=True)
class CellEnd:
    """What a rank says of a cell it has finished; rides in the cell's reply.

    `first_seq` and `next_seq` bound the records of this cell: a rank whose records in
    `range(first_seq, next_seq)` have not all arrived is asked for the rest.
    `collectives` counts, for each group's name, the collectives this rank has launched since the
    group was formed, `sent` and `received` its messages by "group/peer's global rank" (a receive
    from any source under "group/any"); ranks that disagree must re-form. `value` is the cell's
    value, in the JSON form of `nbdist.shared.plain`, if it is plain, `value_repr` else its repr.
    `in_group` tells whether the rank still has a default group: a program may destroy it.
    `in_loops` tells whether loops over loaders have trained in it, and so would start over.
    `notices` are sentences for people, each said once.
    `cut_bytes` of output were not sent and are kept, whole, in `output_file`: `HOST:PATH` where the
    notebook does not see it.
    """

    first_seq: int = 0
    next_seq: int = 0
    collectives: dict[str, int] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)
    received: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    value: Any = None
    value_repr: str | None = None
    notices: tuple[str, ...] = ()
    cut_bytes: int = 0
    output_file: str | None = None
    seconds: float = 0.0
    in_group: bool = True
    in_loops: bool = False

    def to_wire(self) -> dict[str, Any]:
        """Return the JSON form: no deep copy, which `asdict` would make at each cell's end."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_wire(cls, content: dict[str, Any]) -> "CellEnd":
        """Return the end that a reply carried."""
        return cls(**content | {"notices": tuple(content.get("notices", ()))})
