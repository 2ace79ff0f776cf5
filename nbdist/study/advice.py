"""Which layout trains a job best on a machine: candidates, their memory and time, and a choice.

Closed formulas on plain numbers, which know nothing of a model's code. They choose what is then
estimated from the model's own code (`client/advice`), whose figures replace theirs.

Sources of the formulas: Rajbhandari et al., ZeRO, 2020 (states, and bytes of shards); Narayanan et
al., "Efficient Large-Scale Language Model Training", 2021 (bubble, tp's all-reduces); Korthikanti
et al., "Reducing Activation Recomputation", 2022 (activations under tp).
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from nbdist.study.estimate import Traffic
from nbdist.study.machine import Machine, group_of
from nbdist.study.step_time import StepTime, split_communication

HEADROOM: Final = 0.10  # of a device's memory stays free: fragments, CUDA's context, torch itself
MARGIN: Final = 1.05  # times nearer than this count as equal: no prediction is better
WORTH: Final = 1.5  # more devices must be so many times as fast as one
SHORT_S: Final = 3600.0  # a run that one device ends within this needs no more
# That Python, autograd and the driver take for a kernel: an assumption, and that of eager PyTorch;
# compiled models and CUDA graphs take less.
LAUNCH_S: Final = 10e-6
_BUCKET: Final = 25e6  # bytes of DDP's
# Of a sequence that a rank of cp keeps, where a host's ranks can have samples of their own. Source:
# NVIDIA, Megatron Core, parallelism guide: context parallelism is for 8K tokens and more.
_TOKENS: Final = 4096
_CHUNKS: Final = {"interleaved": 2, "1f1b": 1}  # stages of a rank


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be trained. Bytes and operations are those of one sample, in the compute dtype.

    Attributes:
        parameters: Numbers in the model.
        flops: Floating-point operations of a forward and a backward.
        activations: Bytes that a forward leaves for its backward.
        global_batch: Samples in a step.
        kept: Bytes of activations where blocks are computed again; 0 where there are no blocks.
        head: Bytes of `activations` that lie outside of blocks, such as logits.
        blocks: Equal blocks; 0 allows no cut but by samples.
        summed: Bytes that tp sums over its ranks; 0 for those of a transformer's blocks, which sum
            what they keep twice forward and twice backward.
        tokens: Of a sequence; 0 where it is none, which cp cannot cut.
        trainable: The share of parameters with gradients.
        frozen_bytes: Of a parameter without.
        experts: Of each mixture; 0 where ep finds none to share out.
        in_experts: Numbers in all experts together.
        exchanged: Bytes that take its tokens to experts and back, forward and backward.
        no_experts: Why ep finds none, in words.
        optimizer: "adamw", or "sgd" with momentum.
        samples: Of the whole run; 0 where nobody knows.
        launches: Kernels of a forward and a backward of any batch; 0 where they are not known.
    """

    parameters: float
    flops: float
    activations: float
    global_batch: int
    kept: float = 0.0
    head: float = 0.0
    blocks: int = 0
    summed: float = 0.0
    tokens: int = 0
    trainable: float = 1.0
    frozen_bytes: int = 4
    experts: int = 0
    in_experts: float = 0.0
    exchanged: float = 0.0
    no_experts: str = ""
    optimizer: str = "adamw"
    samples: int = 0
    launches: float = 0.0

    @property
    def again(self) -> float:
        """How many times as long a step takes where blocks compute their forward again."""
        return 1 + (1 / 3 if self.trainable > 0.5 else 1 / 2)


@dataclass(frozen=True, slots=True)
class Spread:
    """Sizes of the axes; `stage` is that of ZeRO where only samples are cut, 0 for plain replicas.

    Attributes are as `nbdist.parallelize` names axes.
    """

    pp: int = 1
    dp: int = 1
    fsdp: int = 1
    ep: int = 1
    cp: int = 1
    tp: int = 1
    stage: int = 0

    @property
    def sizes(self) -> dict[str, int]:
        """Ranks along each axis, outermost first."""
        return {axis: getattr(self, axis) for axis in ("pp", "dp", "fsdp", "ep", "cp", "tp")}

    @property
    def world_size(self) -> int:
        """Ranks."""
        return math.prod(self.sizes.values())

    @property
    def apart(self) -> int:
        """Ranks that see other samples."""
        return self.dp * self.fsdp * self.ep

    @property
    def family(self) -> str:
        """The kind of layout, without sizes: "ddp", "zero3", "fsdp tp"."""
        axes = [axis for axis, size in self.sizes.items() if size > 1]
        alone = {"dp": "zero1" if self.stage == 1 else "ddp", "fsdp": f"zero{self.stage}"}
        names = {"": "one device", "dp fsdp": "hsdp", **alone}
        return names.get(" ".join(axes), " ".join(axes))

    @property
    def layout(self) -> str:
        """As `nbdist.parallelize` takes it."""
        alone = self.family in ("ddp", "zero1", "zero2", "zero3")
        if alone or self.world_size == 1:
            return self.family if alone else "ddp"
        return " ".join(f"{axis}={size}" for axis, size in self.sizes.items() if size > 1)

    @property
    def complexity(self) -> tuple[int, ...]:
        """Larger for what is harder to run and to understand."""
        hard = {"tp": 1, "cp": 2, "pp": 3, "ep": 4}
        axes = [hard[axis] for axis, size in self.sizes.items() if size > 1 and axis in hard]
        # Beside a cut, shards hold less than replicas and send no more: nobody takes these. Cuts
        # are no larger than they must be: NVIDIA, Megatron Core, MoE guide.
        replicas = self.dp > 1 and (bool(axes) or self.fsdp > 1)
        return (len(axes), sum(axes), replicas, self.pp * self.cp * self.tp, self.stage)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout with what goes with it, and what is predicted of it.

    Attributes:
        spread: Its axes.
        micro_batch: Samples that a rank has at once.
        parts: Micro-batches of a rank in a step: accumulated, or those of a pipeline.
        checkpoint: Blocks compute their forward again.
        once: Gradients are averaged in the last part only.
        schedule: Of a pipeline.
        peak: Bytes of a rank.
        time: Of a step.
        is_estimated: Bytes are of an estimate of the model's own code, and not of formulas.
    """

    spread: Spread
    micro_batch: int
    parts: int
    checkpoint: bool
    once: bool
    peak: float
    time: StepTime
    schedule: str = "1f1b"
    is_estimated: bool = False

    @property
    def words(self) -> list[str]:
        """The layout, and what goes with it, in a few words."""
        found = [self.spread.family if self.spread.world_size == 1 else self.spread.layout]
        found += ["checkpoint"] if self.checkpoint else []
        pipelined = self.spread.pp > 1
        found += [f"accumulate {self.parts}"] if self.parts > 1 and not pipelined else []
        return found + ([f"{self.parts} micro-batches"] if pipelined else [])

    def samples_s(self, job: Job) -> float:
        """Return samples a second, all ranks together."""
        return job.global_batch / self.time.total_s


@dataclass(frozen=True, slots=True)
class Dropped:
    """A layout that is not advised, and why.

    Attributes:
        name: Of the layout, or its family.
        kind: "memory", "slower" (by formulas alone) or "refused".
        needs: Bytes of the leanest variant, or how many times as long as the fastest it takes.
        has: Bytes of a device.
        said: By what refused it.
    """

    name: str
    kind: str
    needs: float = 0.0
    has: float = 0.0
    said: str = ""


@dataclass(frozen=True, slots=True)
class Choice:
    """What is advised.

    Attributes:
        best: None where nothing fits.
        others: The best of each other family that fits, fastest first.
        dropped: Families of which nothing fits.
        why: "only one", "short", "not worth it", "fastest", "simplest", "nothing fits".
        gain: How many times as fast the fastest is as one device; 0 where one does not fit.
    """

    best: Candidate | None
    others: tuple[Candidate, ...]
    dropped: tuple[Dropped, ...]
    why: str
    gain: float = 0.0


def precision_of(machine: Machine) -> str:
    """Return "bf16", "fp16" or "fp32": the fastest of which a device has units."""
    rates = machine.accelerator.flops
    if rates.get("bfloat16", 0) > 1.5 * rates["float32"]:
        return "bf16"
    return "fp16" if rates.get("float16", 0) > 2.5 * rates["float32"] else "fp32"


def compute_rate(machine: Machine) -> float:
    """Return the operations a second that a step is taken to reach on one device."""
    name = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[precision_of(machine)]
    return machine.accelerator.step_share * machine.accelerator.flops[name]


def schedule_of(stages: int, parts: int, blocks: int) -> str:
    """Return the schedule of a pipeline: "interleaved" orders multiples of the stages only."""
    return "interleaved" if parts % stages == 0 and blocks >= 2 * stages else "1f1b"


def room_of(machine: Machine) -> float:
    """Return the bytes of a device that a training may fill."""
    return (1 - HEADROOM) * machine.accelerator.memory_bytes


def rule_of(job: Job) -> str:
    """Return how the learning rate follows the batch: "linear" for SGD, "sqrt" for Adam's kind."""
    return "linear" if job.optimizer == "sgd" else "sqrt"


def peak_of(job: Job, one: Candidate, compute_bytes: int) -> float:
    """Return the bytes of a rank at the most."""
    its, micro = one.spread, one.micro_batch
    whole = _whole(job, its)
    shards = its.fsdp * its.cp if its.fsdp > 1 else 1
    trained, frozen = job.trainable * whole, (1 - job.trainable) * whole
    states = (4 if job.optimizer == "sgd" else 8) / (its.dp if its.stage == 1 else 1)
    held = (trained * (8 + states) + frozen * job.frozen_bytes) / shards
    casted = compute_bytes < 4
    if its.fsdp > 1:
        is_whole = its.stage == 2 or its.pp > 1 or not job.blocks
        held += compute_bytes * whole * (1 if is_whole else 2 / job.blocks)
        held += 4 * trained if one.once and one.parts > 1 else 4 * trained / max(1, job.blocks)
    elif casted:
        held += compute_bytes * trained  # autocast's copies
    return held + micro * _activations(job, its, one)


def _activations(job: Job, its: Spread, one: Candidate) -> float:
    in_flight = min(its.pp, one.parts) / its.pp
    cut = 0.3 + 0.7 / its.tp  # what lies between attention and mlp is whole under tp
    in_blocks, head = (job.activations - job.head) / its.cp, job.head / its.cp
    if one.checkpoint:
        one_block = cut * in_blocks / job.blocks
        return in_flight * job.kept / its.cp + one_block + head
    return in_flight * cut * in_blocks + head


def _whole(job: Job, its: Spread) -> float:
    """Return the parameters of a rank, shards gathered."""
    experts = job.in_experts
    return (job.parameters - experts + experts / its.ep) / (its.pp * its.tp)


def traffic_of(job: Job, one: Candidate, compute_bytes: int) -> dict[str, Traffic]:
    """Return what a rank sends in a step, by axes."""
    its = one.spread
    whole, samples = _whole(job, its), one.micro_batch * one.parts
    trained = job.trainable * whole
    averages = 1 if one.once else one.parts
    found: dict[str, Traffic] = {}

    def add(axes: str, n: int, rings: float, nbytes: float, rounds: float) -> None:
        if n > 1:
            sent = rings * (n - 1) / n * nbytes
            found[axes] = Traffic(1, round(nbytes), sent, round(rounds), n)

    blocks = max(1, job.blocks) / its.pp
    shards = its.fsdp * its.cp if its.fsdp > 1 else 1
    if shards > 1:
        gathers = (2 if its.stage == 3 and its.pp == 1 else 1) * (1 if its.pp > 1 else one.parts)
        nbytes = compute_bytes * whole * gathers + 4 * trained * (1 if its.pp > 1 else averages)
        axes = "fsdp x cp" if its.cp > 1 else "fsdp"
        add(axes, shards, 1, nbytes, blocks * (shards - 1) * (gathers + averages))
    replicas = its.dp * (its.cp if shards == 1 else 1)
    if replicas > 1:
        nbytes = 4 * trained / shards * averages
        trees = 2 * (replicas - 1).bit_length()
        axes = "dp x cp" if its.cp > 1 and shards == 1 else "dp"
        add(axes, replicas, 2, nbytes, trees * averages * max(1, nbytes / averages / _BUCKET))
    if its.stage == 1:
        found["dp x update"] = Traffic(1, 0, 4 * trained * (its.dp - 1) / its.dp, 1, its.dp)
    of_blocks = job.kept * samples / its.pp
    extra = 1.5 if one.checkpoint else 1.0  # a forward more
    calls = blocks * one.parts
    summed = (job.summed or 4 * job.kept) * samples / its.pp
    add("tp", its.tp, 2, extra * summed / its.cp, 8 * calls * its.tp.bit_length())
    add("cp", its.cp, 1, 8 * extra * of_blocks / its.cp, 8 * calls)
    # Gradients of all else are averaged over ep in each backward, before dp or fsdp sends them.
    others = job.trainable * (job.parameters - job.in_experts) / (its.pp * its.tp)
    exchanged = extra * job.exchanged * samples / its.pp + 2 * 4 * others * one.parts
    add("ep", its.ep, 1, exchanged, (8 + 2 * its.ep.bit_length()) * calls)
    if its.pp > 1:
        chunks = _CHUNKS[one.schedule]
        sent = 2 * chunks * job.kept / job.blocks * samples / its.cp
        found["pp"] = Traffic(1, round(sent), sent, 2 * chunks * one.parts, its.pp)
    return found


def time_of(
    machine: Machine,
    spread: Spread,
    compute_s: float,
    traffic: dict[str, Traffic],
    parts: int,
    schedule: str,
    overlap: float = 1.0,
    launches: float = 0.0,
) -> StepTime:
    """Return the time of a step from a rank's computation and what it sends.

    Args:
        machine: Its links.
        spread: The axes.
        compute_s: Seconds of the rank's computation; of a pipeline's longest stage.
        traffic: By axes, as an estimate has it.
        parts: Micro-batches, for the bubble of a pipeline.
        schedule: Of a pipeline.
        overlap: The share of what could be hidden that is.
        launches: Kernels of the rank. Python launches them ahead of the device; what it takes
            beyond the device's time is the serial part.
    """
    sizes = spread.sizes
    seconds = {
        axes: machine.link_of(group_of(axes, sizes)).time_s(sent) for axes, sent in traffic.items()
    }
    exposed, hidden = split_communication(compute_s, seconds, overlap)
    bubble = compute_s * (spread.pp - 1) / (parts * _CHUNKS[schedule])
    serial = max(0.0, launches * LAUNCH_S - compute_s - exposed - bubble)
    return StepTime(compute_s, exposed, hidden, bubble, serial_s=serial)


def candidates(job: Job, machine: Machine, overlap: float = 1.0) -> list[Candidate]:
    """Return all that divides ranks and batch, whether or not it fits: without peaks' limits."""
    found = []
    for spread in spreads(job, machine):
        found += list(_variants(job, machine, spread, overlap))
    return found


def spreads(job: Job, machine: Machine) -> Iterator[Spread]:
    """Yield the layouts of one device, of one host and of all hosts."""
    yield Spread()
    least = _TOKENS if job.global_batch >= machine.per_host else 1
    for world in sorted({machine.per_host, machine.world_size} - {1}):
        for tp in _divisors(machine.per_host) if job.blocks else [1]:
            for cp in _powers(max(1, job.tokens // least)) if job.blocks else [1]:
                # ep does not go with cp yet.
                for ep in _divisors(job.experts) if job.experts and cp == 1 else [1]:
                    for pp in _divisors(world) if job.blocks else [1]:
                        rest, left = divmod(world, tp * cp * ep * pp)
                        if left or pp > max(job.blocks, 1):
                            continue
                        yield from _by_samples(Spread(pp, 1, 1, ep, cp, tp), rest, machine)


def _by_samples(its: Spread, rest: int, machine: Machine) -> Iterator[Spread]:
    cut = its.pp * its.ep * its.cp * its.tp
    if rest < 1:
        return
    yield replace(its, dp=rest)
    if rest == 1:
        return
    if cut == 1:
        yield replace(its, dp=rest, stage=1)
        yield replace(its, fsdp=rest, stage=2)
    yield replace(its, fsdp=rest, stage=3)
    inside = machine.per_host // (its.ep * its.cp * its.tp)
    if its.pp == 1 and inside > 1 and rest > inside and rest % inside == 0:
        yield replace(its, dp=rest // inside, fsdp=inside, stage=3)


def _variants(job: Job, machine: Machine, its: Spread, overlap: float) -> Iterator[Candidate]:
    share, left = divmod(job.global_batch, its.apart)
    if left or not share:
        return
    compute_bytes = 4 if precision_of(machine) == "fp32" else 2
    seconds = job.flops * job.global_batch / its.world_size / compute_rate(machine)
    if its.pp > 1:  # the last stage has the head beside its blocks: taken for one block more
        seconds *= 1 + its.pp / job.blocks
    sharded = its.fsdp > 1 and its.pp == 1
    for checkpoint in (False, True) if job.blocks and job.kept else (False,):
        for once in (True, False) if sharded else (True,):
            for micro in reversed(_divisors(share)):
                parts = share // micro
                if parts < its.pp:
                    continue  # each stage needs a micro-batch
                schedule = schedule_of(its.pp, parts, job.blocks)
                one = Candidate(
                    *(its, micro, parts, checkpoint, once, 0.0, StepTime(seconds), schedule)
                )
                peak = peak_of(job, one, compute_bytes)
                if peak > room_of(machine) and micro > 1:
                    continue
                traffic = traffic_of(job, one, compute_bytes)
                took = seconds * (job.again if checkpoint else 1)
                launches = job.launches / its.pp * parts * (job.again if checkpoint else 1)
                time = time_of(machine, its, took, traffic, parts, schedule, overlap, launches)
                yield replace(one, peak=peak, time=time)
                if its.pp == 1:
                    break  # the largest that fits sends the least


def choose(
    job: Job, machine: Machine, found: Iterable[Candidate], refused: Iterable[Dropped] = ()
) -> Choice:
    """Return the simplest of the fastest that fit, and what became of the rest."""
    room = room_of(machine)
    every = list(found)
    fitting = [one for one in every if one.peak <= room]
    dropped = [*_too_large(every, fitting, room), *refused]
    if not fitting:
        return Choice(None, (), tuple(dropped), "nothing fits")
    fastest = min(fitting, key=lambda one: one.time.total_s)
    near = [one for one in fitting if one.time.total_s <= MARGIN * fastest.time.total_s]
    best = min(near, key=lambda one: _preference(one, job))
    why = "fastest" if best is fastest else "simplest"
    alone = min(
        (one for one in fitting if one.spread.world_size == 1),
        key=lambda one: one.time.total_s,
        default=None,
    )
    gain = alone.time.total_s / fastest.time.total_s if alone else 0.0
    if alone is not None:
        run_s = alone.time.total_s * job.samples / job.global_batch
        if machine.world_size == 1:
            best, why = alone, "only one"
        elif job.samples and run_s < SHORT_S:
            best, why = alone, "short"
        elif gain < WORTH:
            best, why = alone, "not worth it"
    return Choice(best, tuple(_others(fitting, best)), tuple(dropped), why, gain)


def _preference(one: Candidate, job: Job) -> tuple[object, ...]:
    # Experts are shared out where that costs no more: each then has ep times as many tokens at
    # once (NVIDIA, Megatron Bridge, parallelism strategies).
    lacks_experts = bool(job.in_experts) and one.spread.ep == 1
    its = one.spread
    return (lacks_experts, its.complexity, its.world_size, one.checkpoint, one.time.total_s)


def _others(fitting: list[Candidate], best: Candidate) -> list[Candidate]:
    of_family: dict[str, Candidate] = {}
    for one in sorted(fitting, key=lambda one: one.time.total_s):
        of_family.setdefault(one.spread.family, one)
    of_family.pop(best.spread.family, None)
    return list(of_family.values())


def _too_large(every: list[Candidate], fitting: list[Candidate], room: float) -> Iterator[Dropped]:
    fit = {one.spread.family for one in fitting}
    leanest: dict[str, float] = {}
    for one in every:
        family = one.spread.family
        leanest[family] = min(one.peak, leanest.get(family, math.inf))
    for family, peak in leanest.items():
        if family not in fit:
            yield Dropped(family, "memory", peak, room)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _powers(most: int) -> list[int]:
    return [2**n for n in range(most.bit_length())]
