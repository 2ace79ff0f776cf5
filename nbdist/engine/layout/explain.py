"""A layout in words and numbers, for people."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nbdist.engine.layout.axes.axis import Axis, Sent
from nbdist.engine.layout.plan import cost
from nbdist.engine.layout.plan.axis_facts import AXES, FACTS
from nbdist.engine.layout.plan.inputs import as_tree, samples_in, tokens_in
from nbdist.engine.layout.plan.mesh import MeshShape
from nbdist.engine.layout.policies.efficiency import FULL
from nbdist.engine.layout.policies.policies import Policies
from nbdist.shared.errors import LayoutError
from nbdist.shared.text import name_bytes


@dataclass(frozen=True, slots=True)
class BatchSize:
    """A rank's share of a batch, from which the bytes of tp, cp, ep and pp follow."""

    samples: int
    tokens: int

    @classmethod
    def of(cls, batch: Any) -> "BatchSize":
        """Return the size of a model's inputs, by their first tensor.

        Raises:
            LayoutError: There is no tensor in it.
        """
        tree = as_tree(batch)
        tokens = tokens_in(tree)
        if tokens is None:
            raise LayoutError(
                f"explain got a batch without a tensor ({type(batch).__name__}).",
                do="give what the model is called with: layout.explain(batch=x)",
            )
        return cls(samples_in(tree), tokens)


@dataclass(frozen=True, slots=True)
class Explanation:
    """The effect of a layout on a model, and its cost; its repr is for people.

    Attributes:
        name: The layout's canonical text.
        shape: Sizes of the axes.
        axes: A description of each axis.
        size: Of the whole model.
        local: Of what one rank holds before fsdp: with tp, its parts.
        backend: "gloo" or "nccl".
        batch: A rank's share of a batch, where one was given.
        policies: The policies beside the text.
        inputs: Of blocks that recompute in backward, the bytes that they kept in the last
            forward; 0 before the first.
        compressed: The part of gradients' bytes that `Compress` sends.
        eight_bits: Which layers multiply numbers of eight bits, in words.
    """

    name: str
    shape: MeshShape
    axes: tuple[Axis, ...]
    size: cost.ModelSize
    local: cost.ModelSize
    backend: str
    batch: BatchSize | None = None
    policies: Policies = field(default_factory=Policies)
    inputs: Mapping[str, int] = field(default_factory=dict)
    compressed: float = 1.0
    eight_bits: str = ""

    @property
    def resident_bytes(self) -> float:
        """Parameters and gradients that a rank keeps between steps."""
        return cost.resident_bytes(self.local, self.shape)

    @property
    def sent_bytes(self) -> float:
        """Bytes that a rank sends in a step with one backward: the sum of `traffic`."""
        return sum(self.traffic.values())

    @property
    def traffic(self) -> dict[str, float]:
        """Bytes that a rank sends in a step with one backward, by axis, on average over the ranks.

        `dp` is for averages of copies, `fsdp` for gathers and reductions of shards (both with cp,
        whose ranks share too). The bytes of tp, cp, ep and pp follow from the
        batch (those of ep as if tokens chose experts evenly): without one they are left out, and
        tp, cp and ep where tp's plan has styles of torch, or where blocks compute in low precision
        or again.
        """
        chosen = self.policies.precision
        sent_as = cost.wire(self.local, self.shape, chosen.compute, chosen.reduce)
        if self.compressed < 1:
            sent_as = cost.Wire(reduced=self.compressed)
        inside, between = self.levels
        if between:
            sent_as = cost.Wire(reduced=0)
        shards, copies = cost.shared_bytes(self.local, self.shape, self.backend, sent_as)
        copies += inside + between
        sent = {"dp": copies, "fsdp": shards}
        if self.batch is not None:
            units = {"token": self.batch.tokens, "sample": self.batch.samples}
            for axis, each in self._activations.items():
                # A rank of a pipeline has a part of the blocks.
                ranks = self.shape.pp if FACTS[axis].sends_in_blocks else 1
                sent[axis] = each.nbytes * units[each.unit] / ranks + each.each_step
        return {axis: sent[axis] for axis in AXES if sent.get(axis)}

    @property
    def _activations(self) -> dict[str, Sent]:
        """The activations that axes send, where they are known."""
        found = {axis.name: axis.sent(self.shape) for axis in self.axes}
        return {
            name: sent
            for name, sent in found.items()
            if sent is not None and (self._is_plain or not FACTS[name].sends_in_blocks)
        }

    @property
    def levels(self) -> tuple[float, float]:
        """Bytes that a rank sends inside its group and between groups; 0 without groups."""
        size = self.policies.compress.between if self.policies.compress else None
        if size is None:
            return 0.0, 0.0
        assert size != "hosts", "parallelize has counted the ranks of a host"
        groups = self.shape.world_size // size
        return cost.two_level_bytes(
            self.local.gradient_bytes, size, groups, self.backend, self.compressed
        )

    @property
    def _is_plain(self) -> bool:
        """Whether blocks send over tp and cp in the model's own dtype, once each way."""
        return self.policies.precision.compute == "fp32" and self.policies.checkpoint is None

    def __repr__(self) -> str:
        axes = " x ".join(f"{axis}={n}" for axis, n in self.shape.axes.items())
        whole = name_bytes(self.size.parameter_bytes + self.size.whole_bytes)
        lines = [
            f"layout {self.name}: {axes} on {self.shape.world_size} ranks, {self.backend}",
            f"model: {self.size.parameters:,} parameters, {whole}",
            f"a rank keeps {name_bytes(self.resident_bytes)} of parameters and gradients"
            + self._states(),
            self._whole(),
            f"a rank sends {self._sent()}",
        ]
        lines += [self._idle(), *(axis.summary(self.shape) for axis in self.axes)]
        lines += [self._precision(), self._compresses(), self._forgets(), self._offloads()]
        lines += [axis.details() for axis in self.axes]
        return "\n".join(line for line in lines if line)

    def _whole(self) -> str:
        if not self.local.whole_bytes:
            return ""
        held = f"{self.local.whole_parameters:,} quantized parameters"
        return f"of these {name_bytes(self.local.whole_bytes)} are {held}, kept whole"

    def _idle(self) -> str:
        """Name the axes in the text to which the other axes leave one rank."""
        if not self.shape.idle:
            return ""
        names = " and ".join(self.shape.idle)
        has = "has" if len(self.shape.idle) == 1 else "have"
        others = " ".join(f"{axis}={size}" for axis, size in self.shape.axes.items())
        return f"{names} {has} one rank, which shares nothing: {others} takes all of them"

    def _states(self) -> str:
        share = cost.state_share(self.shape)
        return "" if share == 1 else f", and 1/{1 / share:.0f} of an optimizer's states for them"

    def _sent(self) -> str:
        """Return the bytes that a rank sends; per token where the batch is not known."""
        by_axis = [f"{axis} {name_bytes(sent)}" for axis, sent in self.traffic.items()]
        parts = [f"{name_bytes(self.sent_bytes)} a step"] if by_axis else []
        if len(by_axis) > 1 and self.batch is not None:
            parts = [f"{parts[0]}: {', '.join(by_axis)}"]
        if self.batch is None:
            parts += [
                f"{name_bytes(each.nbytes)} over {axis} for each {each.unit} of its batch"
                + (f" and {name_bytes(each.each_step)} a step" if each.each_step else "")
                for axis, each in self._activations.items()
            ]
        changed = [axis for axis in self.shape.axes if FACTS[axis].sends_in_blocks]
        if changed and not self._is_plain:
            parts.append(f"over {' and '.join(changed)} what these policies make of activations")
        return ", and ".join(parts) or "nothing that is known"

    def _precision(self) -> str:
        chosen = self.policies.precision
        if chosen == FULL:
            return ""
        how = "units are gathered and compute in" if self.shape.fsdp > 1 else "autocast computes in"
        scale = ", its loss scaled by layout.scaler" if chosen.needs_scaler else ""
        around = "bf16" if self.eight_bits else chosen.compute
        computes = f"{how} {around}{scale}; " if chosen.compute != "fp32" else ""
        return f"precision: {computes}{self.eight_bits}gradients are averaged in {chosen.reduce}"

    def _compresses(self) -> str:
        policy = self.policies.compress
        if policy is None:
            return ""
        how: str = policy.method
        if policy.method == "powersgd":
            how += f" of rank {policy.rank} from step {policy.start} on"
        errors = "with" if policy.error_feedback else "without"
        sent = f"sent as {how}, {errors} error feedback, {self.compressed:.1%} of bytes"
        if policy.between is None:
            return f"gradients: {sent}"
        inside, between = map(name_bytes, self.levels)
        return (
            f"gradients: summed up inside groups of {policy.between} ranks ({inside} a rank), "
            f"between them {sent} ({between} a rank)"
        )

    def _offloads(self) -> str:
        policy = self.policies.offload
        if policy is None:
            return ""
        parameters = "shards, their gradients and optimizer states"
        what = [parameters] if policy.parameters else []
        what += ["what blocks keep for backward"] if policy.activations else []
        return f"in the host's memory: {'; '.join(what)}"

    def _forgets(self) -> str:
        policy = self.policies.checkpoint
        if policy is None:
            return ""
        kept = sum(self.inputs.values())
        what = (
            "their inputs and the results of matrix products"
            if policy.selective
            else "their inputs"
        )
        forward = "forward" if self.shape.pp == 1 else "micro-batch"
        measured = f", {name_bytes(kept)} of inputs in the last {forward}" if kept else ""
        return f"activations: {len(self.inputs)} blocks keep {what} alone{measured}"
