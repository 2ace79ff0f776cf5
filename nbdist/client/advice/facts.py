"""The plain facts of a job and of candidates, from estimates of the model's own code."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

from nbdist.client.advice.estimate import EstimatePool
from nbdist.shared.errors import NBDistError, UsageError
from nbdist.study.advice import Candidate, Dropped, Job, compute_rate, precision_of, time_of
from nbdist.study.estimate import Estimate, TensorShape, Traffic, shapes_of
from nbdist.study.machine import Machine


@dataclass(frozen=True, slots=True)
class Training:
    """What is to be trained, as `nbdist.estimate` takes it.

    Attributes:
        factory: Makes the model.
        batch: Shapes of the batch, as it was given.
        loss: As in `estimate`.
        optimizer: Its class, or None for AdamW.
        options: Its arguments.
        pool: Makes the estimates.
    """

    factory: Callable[[], Any]
    batch: Any
    loss: Callable[[Any, Any], Any] | None
    optimizer: type | None
    options: Mapping[str, Any]
    pool: EstimatePool = field(default_factory=EstimatePool)

    @property
    def samples(self) -> int:
        """The samples of the batch: the first size of its first tensor.

        Raises:
            UsageError: It has none.
        """
        first = next((one for one in _shapes(self.batch) if one.shape), None)
        if first is None or first.shape[0] < 1:
            raise UsageError(
                "nbdist.advise finds no tensor with samples in the batch.",
                do="give the batch of a step: torch.empty(8, 1024, dtype=torch.long, "
                'device="meta"), a tuple of arguments or a dict of keywords',
            )
        return first.shape[0]

    @property
    def tokens(self) -> int:
        """The length of a sequence, where the first tensor looks like sequences; else 0."""
        first = next(one for one in _shapes(self.batch) if one.shape)
        is_ids = len(first.shape) == 2 and "int" in first.dtype
        return first.shape[1] if is_ids or len(first.shape) == 3 else 0

    def of(self, samples: int) -> Any:
        """Return the batch's shapes with another number of samples."""
        return _resized(self.batch, self.samples, samples)

    def estimate(
        self, layout: str, machine: Machine, world_size: int, samples: int, *policies: object
    ) -> Estimate:
        """Return what a layout would hold and send in a step of so many samples of a rank."""
        policies = (*precision_policies(machine), *policies)
        device = "cpu" if is_cpu(machine) else "cuda"
        how = {"loss": self.loss, "optimizer": self.optimizer, "options": self.options}
        batch, on_host = self.of(samples), min(machine.per_host, world_size)
        return self.pool.estimate(
            *(self.factory, batch, layout, world_size, *policies),
            **how,
            device=device,
            ranks_on_host=on_host,
        )


def training(
    factory: Callable[[], Any],
    batch: Any,
    loss: Callable[[Any, Any], Any] | None,
    optimizer: type | None,
    options: Mapping[str, Any] | None,
    pool: EstimatePool | None = None,
) -> Training:
    """Return what is to be trained.

    Raises:
        UsageError: There is a loss, and the batch is no pair.
    """
    shapes = shapes_of(batch)
    if loss is not None and not (_is_list(shapes) and len(shapes) == 2):
        found = "a tensor" if isinstance(shapes, TensorShape) else f"a {type(batch).__name__}"
        found += f" of {len(shapes)}" if _is_list(shapes) else ""
        raise UsageError(
            f"With a loss the batch is a pair of inputs and targets, and here it is {found}.",
            do="give (x, y), or no loss where the outputs have their own",
        )
    return Training(factory, shapes, loss, optimizer, dict(options or {}), pool or EstimatePool())


def is_cpu(machine: Machine) -> bool:
    """Return whether ranks compute on CPUs, where messages take the cores that compute."""
    return machine.accelerator.name.startswith("CPU")


def overlap_of(machine: Machine) -> float:
    """Return the share of communication that could be hidden, and is."""
    return 0.0 if is_cpu(machine) else 1.0


def job_of(what: Training, machine: Machine, global_batch: int, samples: int) -> Job:
    """Return the facts of a job, from five estimates.

    Raises:
        UsageError: Its step cannot run without numbers, or the batch has no samples.
    """
    count = min(what.samples, global_batch)
    why_not: dict[str, str] = {}

    def under(layout: str, ranks: int, *policies: object) -> Estimate | None:
        try:
            return what.estimate(layout, machine, ranks, count, *policies)
        except NBDistError as error:
            why_not[layout] = error.what.rstrip(".")
            return None  # there are no blocks, or none that can be cut; a candidate says why

    asked = (("ddp", 1, policy("ActivationCheckpoint")), ("zero3", 2), ("tp=2", 2), ("ep=2", 2))
    with ThreadPoolExecutor(what.pool.count) as pool:
        whole = pool.submit(what.estimate, "ddp", machine, 1, count)
        recomputed, shards, halves, owners = pool.map(lambda one: under(*one), asked)
        one = whole.result()
    # Each unit of fsdp is gathered twice and reduced once; one of them may be the root.
    units = round(shards.traffic["fsdp"].count / 3) if shards and "fsdp" in shards.traffic else 0
    summed = halves.traffic["tp"].nbytes if halves and "tp" in halves.traffic else 0.0
    exchanged = in_experts = 0.0
    if owners:  # each of two has half of the experts, and sends half of what it exchanges
        in_experts = 2 * (one.parameters - owners.parameters)
        averaged = 2 * owners.gradients - one.gradients  # of all else; an all_reduce of two
        exchanged = max(0.0, 2 * (owners.traffic["ep"].nbytes - averaged))
    # Numbers of four bytes each: of a model in 16 bits they are half as many.
    is_sgd = what.optimizer is not None and what.optimizer.__name__ == "SGD"
    return Job(
        parameters=one.parameters / 4,
        flops=one.flops / count,
        activations=one.activations / count,
        global_batch=global_batch,
        kept=recomputed.activations / count if recomputed else 0.0,
        blocks=max(units, 2) if recomputed else 0,
        summed=summed / count,
        experts=owners.experts if owners else 0,
        in_experts=in_experts / 4,
        exchanged=exchanged / count,
        no_experts=why_not.get("ep=2", ""),
        tokens=what.tokens,
        trainable=one.gradients / max(1, one.parameters),
        optimizer="sgd" if is_sgd else "adamw",
        samples=samples,
        launches=one.launches,
    )


def estimated(
    what: Training, machine: Machine, some: Sequence[Candidate]
) -> list[Candidate | Dropped]:
    """Return candidates with the figures of the model's own code; refused ones as dropped."""

    def one_of(one: Candidate) -> Candidate | Dropped:
        try:
            return _estimated(what, machine, one)
        except NBDistError as error:
            said = ": ".join(filter(None, (error.what.rstrip("."), error.why)))
            return Dropped(one.spread.family, "refused", said=said)

    with ThreadPoolExecutor(what.pool.count) as pool:
        return list(pool.map(one_of, some))


def _estimated(what: Training, machine: Machine, one: Candidate) -> Candidate:
    its = one.spread
    in_pipeline = one.parts if its.pp > 1 else 1
    found = what.estimate(
        *(its.layout, machine, its.world_size, one.micro_batch * in_pipeline),
        *policies_of(one),
    )
    repeats = one.parts // in_pipeline
    traffic = {axes: _repeated(axes, sent, repeats, one) for axes, sent in found.traffic.items()}
    # Gradients of the parts before wait beside a forward's activations.
    peak = found.peak + (found.gradients if repeats > 1 else 0)
    flops = max(rank.flops for rank in found.ranks)
    launches = max(rank.launches for rank in found.ranks) * repeats
    seconds = flops * repeats / compute_rate(machine)
    time = time_of(
        *(machine, its, seconds, traffic, one.parts, one.schedule, overlap_of(machine), launches)
    )
    return replace(one, peak=peak, time=time, is_estimated=True)


def policy(name: str, *given: object, **by_name: object) -> object:
    """Return a policy as users write it: `nbdist.Precision("bf16")`.

    They are classes of the ranks' code, without torch; the public package hands them out.
    """
    return getattr(import_module("nbdist"), name)(*given, **by_name)


def policies_of(one: Candidate) -> tuple[object, ...]:
    """Return the policies of a candidate but precision."""
    found: list[object] = [policy("ActivationCheckpoint")] if one.checkpoint else []
    if one.spread.pp > 1:
        found.append(policy("Pipeline", schedule=one.schedule, microbatches=one.parts))
    return tuple(found)


def precision_policies(machine: Machine) -> tuple[object, ...]:
    """Return the policy of the precision, or none."""
    name = precision_of(machine)
    return () if name == "fp32" else (policy("Precision", name),)


def _repeated(axes: str, sent: Traffic, repeats: int, one: Candidate) -> Traffic:
    only_replicas = one.spread.fsdp == 1 and "dp" in axes.split(" x ")
    if only_replicas:
        return sent  # averaged in the last part
    return replace(
        sent,
        count=sent.count * repeats,
        payload=sent.payload * repeats,
        nbytes=sent.nbytes * repeats,
        rounds=sent.rounds * repeats,
    )


def _shapes(batch: Any) -> list[TensorShape]:
    if isinstance(batch, TensorShape):
        return [batch]
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    return [shape for one in batch for shape in _shapes(one)] if _is_list(batch) else []


def _is_list(batch: Any) -> bool:
    return isinstance(batch, list | tuple)


def _resized(batch: Any, before: int, samples: int) -> Any:
    if isinstance(batch, TensorShape):
        is_batch = batch.shape[:1] == (before,)
        return TensorShape((samples, *batch.shape[1:]), batch.dtype) if is_batch else batch
    if isinstance(batch, Mapping):
        return {name: _resized(one, before, samples) for name, one in batch.items()}
    if _is_list(batch):
        return type(batch)([_resized(one, before, samples) for one in batch])
    return batch
