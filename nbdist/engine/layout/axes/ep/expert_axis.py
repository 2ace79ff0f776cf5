"""The axis `ep` of a layout."""

import math

from torch import nn

from nbdist.engine.compat import torch_modules
from nbdist.engine.layout.axes.axis import Axis, Sent, Spreading
from nbdist.engine.layout.axes.ep import find_experts, find_lists, parameters
from nbdist.engine.layout.axes.ep.experts import Experts, OnOwners
from nbdist.engine.layout.axes.ep.lists import Listed, ListOnOwners
from nbdist.engine.layout.axes.pp.stages import USUAL, makes_halves
from nbdist.engine.layout.plan.mesh import MeshShape
from nbdist.engine.layout.policies.policies import Policies
from nbdist.shared.errors import LayoutError


class ExpertAxis(Axis):
    """Some of the experts of each mixture; samples of its own."""

    name = "ep"

    def __init__(self) -> None:
        self._found: list[Experts] = []
        self._lists: list[Listed] = []
        self._here: list[tuple[str, OnOwners | ListOnOwners]] = []
        self._stacks: list[nn.Module] = []  # on this rank, as the next two
        self._of_lists: dict[int, int] = {}  # in which dim parameters are cut, by their `id`
        self._parents: list[nn.Module] = []  # of lists
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
        example = work.policies.experts.example
        self._found, self._lists = find_experts.find(work.model, example, work.mesh["ep"])
        work.experts = math.gcd(*(found.count for found in self._every))
        if self._lists and work.shape.tp > 1:
            raise LayoutError(
                f"ep does not go with tp for experts of a list, as {self._lists[0].name} is.",
                why="each rank keeps a part of every expert of a list, and tp another",
                do="leave tp out, or stack the experts' weights in one module",
            )
        if work.policies.checkpoint is not None and not self._others(work.blocks):
            raise LayoutError(
                "ActivationCheckpoint finds no blocks beside experts.",
                why="experts of a list run on their ranks, together",
                do="leave ActivationCheckpoint out",
            )

    def cut(self, work: Spreading) -> None:
        """Exchange tokens around the experts; what tp sums lies around that."""
        mesh, model = work.mesh["ep"], work.model
        for found in self._found:
            module = model.get_submodule(found.name)
            if next(module.parameters(), None) is not None:  # else another stage's
                self._here.append((found.name, OnOwners(module, found, mesh)))
                self._stacks.append(module)
        work.blocks = self._others(work.blocks)
        is_alone = max(work.shape.dp, work.shape.fsdp) == 1
        for listed in self._lists:
            parent = model.get_submodule(listed.parent)
            experts = find_lists.experts_in(model.get_submodule(listed.name))
            if experts:
                on_owners = ListOnOwners(parent, experts, listed, mesh, is_alone=is_alone)
                self._here.append((listed.name, on_owners))
                self._of_lists |= on_owners.cut
                self._parents.append(parent)

    def hold(self, work: Spreading) -> None:
        """Keep this rank's experts."""
        mesh = work.mesh["ep", "tp"] if work.shape.tp > 1 else work.mesh["ep"]
        stacked = (id(p) for module in self._stacks for p in module.parameters())
        cut = dict.fromkeys(stacked, 0) | self._of_lists
        units = [*work.blocks.values(), *self._parents, work.model]
        parameters.share_out(work.model, cut, mesh, list(dict.fromkeys(units)))
        self._average_bytes = parameters.average_bytes(work.model, mesh)

    def _others(self, blocks: dict[str, nn.Module]) -> dict[str, nn.Module]:
        """Return the blocks that are no experts of a list."""
        lists = tuple(f"{listed.name}." for listed in self._lists)
        return {name: block for name, block in blocks.items() if not name.startswith(lists)}

    @property
    def _every(self) -> list[Experts | Listed]:
        return [*self._found, *self._lists]

    def sent(self, shape: MeshShape) -> Sent:
        """Return the rows of tokens, were they for all experts alike, and averages of gradients."""
        others = (shape.ep - 1) / shape.ep
        beside = sum(experts.step_bytes for _, experts in self._here)
        return Sent(
            others * sum(found.token_bytes for found in self._every),
            each_step=self._backwards * (others * beside + self._average_bytes),
        )

    def summary(self, shape: MeshShape) -> str:
        """Return the modules, and what a rank has of them."""
        first, count = self._every[0], len(self._every)
        modules = first.name if count == 1 else f"{first.name} and {count - 1} more"
        each = "each micro-batch's" if shape.pp > 1 else "each"
        whole = (
            "; of experts in lists a rank keeps a part of each, its own come together in each "
            "forward, and their forwards' lines run twice"
        )
        return (
            f"ep: {first.count // shape.ep} of {first.count} experts a rank, {first.chosen:g} for "
            f"a token, in {modules}; gradients of all else are averaged over {shape.ep} ranks in "
            f"{each} backward" + whole * bool(self._lists)
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
