"""The axis `tp` of a layout."""

import torch.distributed as dist

from nbdist.engine.layout.axes.axis import Axis, Sent, Spreading
from nbdist.engine.layout.axes.tp import cuts, tp
from nbdist.engine.layout.plan import random_numbers
from nbdist.engine.layout.plan.mesh import MeshShape
from nbdist.engine.layout.policies.policies import Policies
from nbdist.shared.errors import LayoutError


class TensorAxis(Axis):
    """Parts of each weight."""

    name = "tp"
    _plan: cuts.TensorPlan
    _token_bytes: float | None = None  # where the plan shows it
    _weight_bytes = 0.0

    def refuse_compiled(self, shape: MeshShape, policies: Policies, *, is_wrapped: bool) -> None:
        """Refuse a checkpoint in a graph of the whole model.

        Raises:
            LayoutError: It is asked for.
        """
        if policies.checkpoint is not None:
            raise LayoutError(
                "A model that is compiled as a whole cannot get both tp and ActivationCheckpoint.",
                why="graphs end where a block computes again, and torch fails to end one behind an "
                "embedding that is cut",
                do="compile the blocks, before or after: block.compile()",
            )

    def plan(self, work: Spreading) -> None:
        """Plan the cuts, proven by a small forward, and compute a rank's traffic."""
        policy, axis = work.policies.tensor, work.mesh["tp"]
        self._plan = work.plan = plan = tp.find_plan(work.model, policy, axis, work.blocks)
        if cuts.is_known(plan):
            summed, gathered = cuts.token_widths(plan, work.model)
            scatters = policy.sequence and dist.get_backend(axis.get_group()) == "gloo"
            logits = [] if policy.loss else gathered
            self._token_bytes = cuts.token_bytes(summed, logits, axis.size(), scatters=scatters)
            self._weight_bytes = cuts.weight_bytes(plan, work.model, axis.size(), work.shape.ep)

    def cut(self, work: Spreading) -> None:
        """Cut the weights that this rank has."""
        # Twice where parameters are tied: both places are cut.
        held = [name.split(".") for name, _ in work.model.named_parameters(remove_duplicate=False)]
        # Also what they are parts of: a layer with an adapter is cut as one.
        owners = {".".join(name[:end]) for name in held for end in range(1, len(name))}
        here = self._plan.within(owners)
        axis = work.mesh["tp"]
        tp.apply(work.model, here, work.policies.tensor, axis, work.blocks, work.runs)
        random_numbers.align(axis, work.shape.data_part(dist.get_rank())[0])
        work.cut = {cut.module for cut in here.cuts}

    def sent(self, shape: MeshShape) -> Sent | None:
        """Return the traffic of sums and gathers, and of weights that pack projections."""
        if self._token_bytes is None:
            return None
        return Sent(self._token_bytes, each_step=self._weight_bytes / shape.pp)

    def details(self) -> str:
        """Return the plan, module by module."""
        return str(self._plan)
