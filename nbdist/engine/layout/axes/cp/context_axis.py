"""The axis `cp` of a layout."""

import torch.distributed as dist

from nbdist.engine.compat import torch_transformer
from nbdist.engine.layout.axes.axis import Axis, Sent, Spreading
from nbdist.engine.layout.axes.cp import context, find, follow
from nbdist.engine.layout.axes.tp import cuts, fit
from nbdist.engine.layout.plan import random_numbers
from nbdist.engine.layout.plan.mesh import MeshShape
from nbdist.shared.errors import LayoutError


class ContextAxis(Axis):
    """Parts of the sequence."""

    name = "cp"
    _context: context.Context

    def plan(self, work: Spreading) -> None:
        """Find which dims follow the sequence, proven by a small forward."""
        cut, tp = work.plan, work.shape.tp
        # Heads are counted as on one rank of tp.
        cut = cut if cut and cuts.is_known(cut) else None
        parts = fit.parts(work.model, cut, tp) if cut else {}
        sizes = cut.sizes if cut else ()
        self._context = work.context = find.find(
            work.model, work.policies.context, work.mesh["cp"], work.blocks, parts, sizes
        )

        lists = list(context.by_list(self._context.hidden))
        if len(lists) > 1 and (work.shape.sizes["pp"] > 1 or work.policies.tensor.sequence):
            found = " and ".join(follow.list_of(names[0]) for names in lists)
            raise LayoutError(
                f"cp cuts {found}, and beside pp or TensorParallel(sequence=True) one list.",
                why="each has a sequence of its own, and these pass parts of one on",
                do="leave pp and sequence=True out: cp with tp, dp or fsdp",
            )

    def cut(self, work: Spreading) -> None:
        """Have blocks work on parts of sequences."""
        torch_transformer.keep_padding(work.model)
        axis = work.mesh["cp"]
        parts = work.shape.tp if work.policies.tensor.sequence else 1
        # Beside the blocks that other axes know, those that stand alone in their list.
        names = work.blocks if work.begins else self._context.hidden
        blocks = {name: work.model.get_submodule(name) for name in names}
        context.apply(self._context, work.policies.context, axis, blocks, parts, work.begins)
        random_numbers.align(axis, work.shape.data_part(dist.get_rank())[0])

    def sent(self, shape: MeshShape) -> Sent:
        """Return the traffic of attention and of the ends of the blocks."""
        return Sent(self._context.token_bytes)

    def summary(self, shape: MeshShape) -> str:
        """Return the change of attention, and the ranks that average gradients."""
        return f"{self._context}; gradients are averaged over {_averaged(shape)}"


def _averaged(shape: MeshShape) -> str:
    if shape.fsdp > 1:
        shards = f"{shape.shards} shards (fsdp x cp)"
        return f"dp={shape.dp} x {shards}" if shape.dp > 1 else shards
    return f"{shape.replicas} replicas ({' x '.join(shape.averaged)})"
