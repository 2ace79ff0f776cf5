"""The axis `ep` of a layout."""

from torch import nn

from nbdist.engine.compat import torch_modules
from nbdist.engine.layout.axes.axis import Axis, Sent, Spreading
from nbdist.engine.layout.axes.ep import exchange, find_experts, parameters
from nbdist.engine.layout.axes.ep.experts import Experts, OnOwners
from nbdist.engine.layout.axes.pp.stages import USUAL, makes_halves
from nbdist.engine.layout.plan.mesh import MeshShape
from nbdist.engine.layout.policies.policies import Policies
from nbdist.shared.errors import LayoutError


class ExpertAxis(Axis):
    """Some of the experts of each mixture; samples of its own."""

    name = "ep"

    def __init__(self) -> None:
        self._found: list[Experts] = []
        self._here: list[tuple[str, OnOwners]] = []
        self._average_bytes = 0.0
        self._backwards = 1  # in a step

    def refuse_compiled(self, shape: MeshShape, policies: Policies, *, is_wrapped: bool) -> None:
        """Refuse a model that is compiled.

        Raises:
            LayoutError: It is.
        """
        raise _compiled("The model")

    def check_device(self, shape: MeshShape, device_type: str, backend: str) -> None:
        """Refuse cp.

        Raises:
            LayoutError: The layout has it.
        """
        if shape.cp > 1:
            raise LayoutError(
                "ep does not go with cp yet.",
                why="it sends each rank's own tokens, and ranks of cp have parts of one sequence",
                do='leave one out, as in "dp=-1 ep=2"; ep goes with dp, fsdp, pp and tp',
            )

    def check(self, model: nn.Module) -> None:
        """Refuse parts that are compiled.

        Raises:
            LayoutError: One is.
        """
        for name, module in model.named_modules():
            if torch_modules.is_compiled(module):
                raise _compiled(name)

    def plan(self, work: Spreading) -> None:
        """Find the modules of experts, proven by a small forward.

        Raises:
            LayoutError: There are none that ranks can share, or the schedule of pp makes halves, or
                gradients are to be averaged in a low precision.
        """
        reduce, chosen = work.policies.precision.reduce, work.policies.pipeline
        if reduce != "fp32":
            raise LayoutError(
                f'ep does not average gradients in {reduce}, as Precision(reduce="{reduce}") asks.',
                why="it adds them up in float32",
                do="leave reduce out",
            )
        if work.shape.pp > 1:
            if makes_halves(chosen.schedule):
                raise LayoutError(
                    f'ep does not go with the schedule "{chosen.schedule}".',
                    why="it makes a backward in halves, and tokens are exchanged in one of them",
                    do='Pipeline("1f1b")',
                )
            self._backwards = chosen.microbatches or USUAL
        self._found = find_experts.find(work.model, work.policies.experts.example, work.mesh["ep"])

    def cut(self, work: Spreading) -> None:
        """Exchange tokens around the experts; what tp sums lies around that."""
        for found in self._found:
            module = work.model.get_submodule(found.name)
            if next(module.parameters(), None) is not None:  # else another stage's
                self._here.append((found.name, OnOwners(module, found, work.mesh["ep"])))

    def hold(self, work: Spreading) -> None:
        """Keep this rank's experts."""
        modules = [work.model.get_submodule(name) for name, _ in self._here]
        mesh = work.mesh["ep", "tp"] if work.shape.tp > 1 else work.mesh["ep"]
        units = [*work.blocks.values(), work.model]
        parameters.share_out(work.model, modules, mesh, units)
        self._average_bytes = parameters.average_bytes(work.model, mesh)

    def sent(self, shape: MeshShape) -> Sent:
        """Return the rows of tokens, were they for all experts alike, and averages of gradients."""
        others = (shape.ep - 1) / shape.ep
        counts = sum(exchange.count_bytes(experts.of, shape.ep) for _, experts in self._here)
        return Sent(
            others * sum(found.token_bytes for found in self._found),
            each_step=self._backwards * (others * counts + self._average_bytes),
        )

    def summary(self, shape: MeshShape) -> str:
        """Return the modules, and what a rank has of them."""
        first, count = self._found[0], len(self._found)
        modules = first.name if count == 1 else f"{first.name} and {count - 1} more"
        each = "each micro-batch's" if shape.pp > 1 else "each"
        return (
            f"ep: {first.count // shape.ep} of {first.count} experts a rank, {first.chosen} for a "
            f"token, in {modules}; gradients of all else are averaged over {shape.ep} ranks in "
            f"{each} backward"
        )

    def details(self) -> str:
        """Return how many tokens this rank's experts had in the newest forward."""
        return "\n".join(
            f"{name}: tokens by expert in the last forward, on this rank: {experts.counts}"
            for name, experts in self._here
            if experts.counts
        )


def _compiled(what: str) -> LayoutError:
    return LayoutError(
        f"{what} is compiled, and ep does not take it.",
        why="how many tokens an expert gets is known while the forward runs alone",
        do="leave torch.compile out",
    )
