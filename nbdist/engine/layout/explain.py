"""A layout in words and numbers, for people."""

from dataclasses import dataclass

from nbdist.engine.layout import cost
from nbdist.engine.layout.context import Context
from nbdist.engine.layout.cuts import Plan
from nbdist.engine.layout.mesh import MeshShape
from nbdist.engine.layout.pipeline import Plan as Stages


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a layout does to a model, and what it costs; its repr is made for people.

    Attributes:
        name: The layout's canonical text.
        shape: Sizes of the axes.
        blocks: What fsdp gathers one by one.
        size: Of the whole model.
        local: Of what one rank holds before fsdp: with tp, its parts.
        backend: "gloo" or "nccl".
        plan: What tp cuts, if it does.
        context: What cp does, if it does.
        token_bytes: What one token of a batch makes a rank send over tp, where the plan tells.
        stages: What pp cuts, if it does.
    """

    name: str
    shape: MeshShape
    blocks: tuple[str, ...]
    size: cost.ModelSize
    local: cost.ModelSize
    backend: str
    plan: Plan | None = None
    token_bytes: float | None = None
    stages: Stages | None = None
    context: Context | None = None

    @property
    def resident_bytes(self) -> float:
        """Parameters and gradients that a rank keeps between steps."""
        return cost.resident_bytes(self.local, self.shape)

    @property
    def sent_bytes(self) -> float:
        """What a rank sends in a step with one backward, over dp and fsdp."""
        return cost.sent_bytes(self.local, self.shape, self.backend)

    def __repr__(self) -> str:
        axes = " x ".join(f"{axis}={n}" for axis, n in self.shape.axes.items())
        whole = cost.human(self.size.parameter_bytes)
        lines = [
            f"layout {self.name}: {axes} on {self.shape.world_size} ranks, {self.backend}",
            f"model: {self.size.parameters:,} parameters, {whole}",
            f"a rank keeps {cost.human(self.resident_bytes)} of parameters and gradients"
            + self._states(),
            f"a rank sends {cost.human(self.sent_bytes)} a step",
        ]
        if self.token_bytes is not None:
            lines[-1] += f", and over tp {cost.human(self.token_bytes)} for each token of its batch"
        if self.stages is not None:
            sent = cost.human(self.stages.sent_bytes)
            lines[-1] += f", and over pp {sent} for each {self.stages.unit} of its batch"
            lines.append(str(self.stages))
        if self.context is not None:
            sent = cost.human(self.context.token_bytes)
            lines[-1] += f", and over cp {sent} for each token of its batch"
            lines.append(f"{self.context}; gradients are averaged over {self._averaged()}")
        if self.shape.fsdp > 1:
            lines.append(self._units())
        if self.plan is not None:
            lines.append(str(self.plan))
        return "\n".join(lines)

    def _states(self) -> str:
        share = cost.state_share(self.shape)
        return "" if share == 1 else f", and 1/{1 / share:.0f} of an optimizer's states for them"

    def _averaged(self) -> str:
        if self.shape.fsdp > 1:
            shards = f"{self.shape.shards} shards (fsdp x cp)"
            return f"dp={self.shape.dp} x {shards}" if self.shape.dp > 1 else shards
        return f"{self.shape.replicas} replicas" + (" (dp x cp)" if self.shape.dp > 1 else " (cp)")

    def _units(self) -> str:
        if not self.blocks:
            return "no repeated blocks found: the whole model is gathered at once"
        shown = ", ".join(self.blocks[:4]) + (", ..." if len(self.blocks) > 4 else "")
        return f"gathered one by one: {len(self.blocks)} blocks ({shown}), then the rest"
