"""The `pp` axis: each rank keeps the blocks of its stages, in the same model under the same names.

    trace          a record of a forward, on fake tensors
    stages         which blocks, and parameters beside them, go to which rank
    stage_forward  hooks that run a part of the forward
    _prove         each part on its rank, on the model as it is: the same output?
    _empty         weights of other ranks are removed

Nothing is changed until the proof has been made. `schedule_runner` runs the steps.
"""

import gc
import itertools
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves

from nbdist.engine.compat import torch_fakes
from nbdist.engine.layout.axes.pp import segment_times, stages
from nbdist.engine.layout.axes.pp.alive import Crossing, TensorSpec
from nbdist.engine.layout.axes.pp.shared_weights import shared_by
from nbdist.engine.layout.axes.pp.stage_forward import StageForward
from nbdist.engine.layout.axes.pp.stage_trace import ForwardTrace, find, trace
from nbdist.engine.layout.axes.pp.stages import Stage
from nbdist.engine.layout.axes.tp.proof import TOLERANCE, evaluating, of_rank_0
from nbdist.engine.layout.plan import numbers
from nbdist.engine.layout.plan.inputs import Inputs
from nbdist.engine.layout.plan.trace import untouched
from nbdist.engine.layout.policies.policies import Pipeline
from nbdist.engine.layout.policies.precision import Imitation
from nbdist.shared.error_text import named
from nbdist.shared.errors import LayoutError
from nbdist.shared.text import aligned


@dataclass(frozen=True, slots=True)
class StagePlan:
    """The cut of a model into stages.

    Attributes:
        policy: The schedule, and how many micro-batches.
        pp: Ranks of a pipeline.
        stages: All of them, in the order of the data.
        trace: Of a forward with the inputs that were tried, as the model was built.
        inputs: The tried inputs.
        balance: The measure by which stages were balanced, in words.
        imitation: The precision in which the layout computes.
        sent: What goes to the stage that begins with a block then, by the block's number.
    """

    policy: Pipeline
    pp: int
    stages: tuple[Stage, ...]
    trace: ForwardTrace
    inputs: Inputs
    balance: str
    imitation: Imitation
    sent: dict[int, tuple[Crossing, ...]]

    def elsewhere(self, rank: int) -> list[str]:
        """Return the names of modules that do not run at a place on the axis pp."""
        own = {n for stage in self.of_rank(rank) for n in range(stage.first, stage.end)}
        blocks = [name for i, name in enumerate(self.trace.blocks) if i not in own]
        return blocks + [name for name, used in self.trace.beside.items() if not used & own]

    def here(self, rank: int) -> list[str]:
        """Return the names of modules that run there outside of blocks; some are parts of one."""
        own = {n for stage in self.of_rank(rank) for n in range(stage.first, stage.end)}
        return [
            name
            for name, calls in self.trace.calls.items()
            if name not in self.trace.blocks
            and any(not call.is_staged or call.segment in own for call in calls)
        ]

    def of_rank(self, rank: int) -> tuple[Stage, ...]:
        """Return the stages of a place on the axis pp."""
        return tuple(stage for stage in self.stages if stage.rank == rank)

    @property
    def sent_bytes(self) -> float:
        """Bytes that a rank sends over pp per token or sample, forward and backward, on average."""
        size = sum(
            crossing.spec.nbytes
            for before, after in itertools.pairwise(self.stages)
            if before.rank != after.rank
            for crossing in self.sent[after.first]
        )
        return 2 * size / self.pp / self._inputs[1]

    @property
    def unit(self) -> str:
        """The unit of `sent_bytes`: "token" or "sample"."""
        return self._inputs[0]

    @property
    def _inputs(self) -> tuple[str, int]:
        first = next(
            t
            for t in tree_leaves(self.inputs.args + tuple(self.inputs.keywords.values()))
            if isinstance(t, torch.Tensor)
        )
        if first.dim() > 1 and not first.is_floating_point():
            return "token", first.numel()
        return "sample", len(first)

    def __str__(self) -> str:
        policy = self.policy
        count = policy.microbatches or stages.USUAL
        wait = stages.bubble(policy.schedule, self.pp, count)
        cut = f"pp: {len(self.stages)} stages on {self.pp} ranks, {policy.schedule}, "
        about = "" if policy.microbatches else "about "
        cut += f"{about}{count} micro-batches a step; a rank waits {wait:.0%} of a step "
        lines = [
            cut + "where all blocks take the same time",
            f"stages, balanced by {self.balance}:",
        ]
        rows = [
            (f"stage {s.index}", f"rank {s.rank} of pp", *self._described(s)) for s in self.stages
        ]
        lines += [f"  {line}" for line in aligned(rows)]
        if shared := ", ".join(shared_by(self.stages)):
            lines.append(f"{shared}: a copy on each of its stages, whose gradients are added up")
        return "\n".join(lines)

    def _described(self, stage: Stage) -> tuple[str, str]:
        names = stage.blocks
        blocks = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"
        inside = {
            name
            for block in self.trace.blocks
            for name in stage.parameters
            if name.startswith(f"{block}.")
        }
        beside = dict.fromkeys(
            name.rpartition(".")[0] or name for name in stage.parameters if name not in inside
        )
        extra = f", {', '.join(beside)}" if beside else ""
        return (
            blocks + extra,
            f"{stage.numbers:,} parameters, {stage.share:.0%} of the {self._what}",
        )

    @property
    def _what(self) -> str:
        return "time" if self.policy.split == "time" else "parameters"


def find_plan(
    model: nn.Module,
    policy: Pipeline,
    mesh: DeviceMesh,
    blocks: list[str],
    imitation: Imitation,
) -> tuple[StagePlan, StageForward]:
    """Return the proven cut of a model, and the hooks that will run its parts. Collective.

    Args:
        model: On its device, with the same weights on every rank; not changed.
        policy: The policy of pp.
        mesh: The axis `pp`.
        blocks: From `find_blocks`.
        imitation: The precision in which the layout will compute.

    Raises:
        LayoutError: The model has no blocks, too few, or cannot be run in parts; it is untouched.
    """
    pp = mesh.size()
    stages.check_microbatches(policy, pp)
    names = blocks or _layers(model)
    if not names:
        raise LayoutError(
            f"{type(model).__name__} has no list of blocks that could be cut into stages.",
            why="pp gives each rank some elements of a ModuleList or Sequential",
            do='put what the model repeats into a list, or use "zero3", which cuts any model',
        )
    inputs, seen = find(model, names, policy.example)
    device = next(model.parameters()).device
    inputs = inputs.map(lambda t: of_rank_0(t.to(device)))
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    if policy.split == "time" and len(seen.blocks) > 1:
        costs = segment_times.measure(model, seen.blocks, inputs)
    else:
        costs = _numbers_in_segments(seen, sizes)
    firsts = stages.first_blocks(policy, pp, seen.blocks, costs, seen.cannot)
    seen = trace(model, names, inputs, device, firsts=firsts)
    stages.refuse_cut(seen.blocks, seen.cannot)
    count = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    places = {name: count[id(p)] for name, p in model.named_parameters()}
    found = stages.stages(policy, pp, seen.blocks, firsts, seen.uses, sizes, places, costs)
    _check_halves(policy, found, seen)
    balance = policy.split if isinstance(policy.split, str) else "parameters"
    if policy.split is not None and not isinstance(policy.split, str):
        balance = "what was asked for"
    low = trace(model, list(seen.blocks), inputs, device, imitation, firsts)
    plan = StagePlan(policy, pp, found, seen, inputs, balance, imitation, low.crossings)
    forward = StageForward(model, seen)
    if numbers.are_here():
        forward.install()
        try:
            _prove(plan, forward, mesh)
        finally:
            forward.remove()
    return plan, forward


def apply(model: nn.Module, plan: StagePlan, rank: int, device_type: str) -> None:
    """Remove the weights of other ranks of the axis pp from `model`.

    Args:
        model: On its device, whole, or on meta.
        plan: From `find_plan`.
        rank: This rank's place on the axis.
        device_type: Where weights on meta will be.
    """
    kept = [name for stage in plan.of_rank(rank) for name in stage.parameters]
    _empty(model, kept, plan.elsewhere(rank), plan.here(rank), device_type)
    gc.collect(0)  # the weights, where a cycle held them


def _layers(model: nn.Module) -> list[str]:
    """Return the layers of a model without blocks: of its outermost lists, or of the longest.

    So are a plain `Sequential`, and an encoder and a decoder of one layer each.
    """
    lists = {
        path: [
            f"{path}.{name}".lstrip(".")
            for name, child in part.named_children()
            if next(child.parameters(), None) is not None
        ]
        for path, part in model.named_modules()
        if isinstance(part, nn.Sequential | nn.ModuleList)
    }
    outermost = [
        name
        for path, names in lists.items()
        if not any(path.startswith(f"{other}.".lstrip(".")) for other in lists if other != path)
        for name in names
    ]
    longest = max(lists.values(), key=len, default=[])
    return next((names for names in (outermost, longest) if len(names) > 1), [])


def _numbers_in_segments(seen: ForwardTrace, sizes: dict[str, int]) -> list[float]:
    counts = [0.0] * len(seen.blocks)
    for name, segments in seen.uses.items():
        if segments:
            counts[min(segments)] += sizes[name]
    return counts


def _check_halves(policy: Pipeline, found: Sequence[Stage], seen: ForwardTrace) -> None:
    for stage in found[1:-1] if stages.makes_halves(policy.schedule) else ():
        if any(crossing.since >= stage.first for crossing in seen.crossings[stage.end]):
            raise LayoutError(
                f"{stage.blocks[0]} makes of its weights alone what a later stage uses, which "
                f'"{policy.schedule}" cannot train.',
                why="torch's half of a backward for the weights begins where what a stage has "
                "received goes",
                do='Pipeline("1f1b"), "gpipe" or "interleaved"',
            )


def _prove(plan: StagePlan, forward: StageForward, mesh: DeviceMesh) -> None:
    """Run each stage on its rank, as a step does, and compare with the whole. Collective.

    So what a block leaves for another one where no one sees it, as on an object that both hold, is
    missing here, too. The whole runs last, for it leaves all of that everywhere.

    Raises:
        LayoutError: They differ, or a part does not run. On all ranks.
    """
    model, last = forward.model, plan.stages[-1]
    found: Any = ()
    with untouched(model), evaluating(model), torch.no_grad():
        for stage in plan.stages:
            found = _run_on_its_rank(plan, forward, stage, found, mesh)
        whole = forward.run(0, len(plan.trace.blocks), plan.inputs, plan.trace)
    problem = None
    if last.rank == mesh.get_local_rank():
        tensors = list(zip(_real(whole), _real(found), strict=True))
        if not all(_has_numbers(b) and _is_near(a, b) for a, b in tensors):
            problem = _not_the_same(model, last, "the output of all stages is another one")
    _raise_everywhere(problem, last, mesh)


def _run_on_its_rank(
    plan: StagePlan, forward: StageForward, stage: Stage, received: Any, mesh: DeviceMesh
) -> Any:
    """Return on all ranks what a stage sends; of the last one its rank gets the output."""
    found, problem = None, None
    specs = [crossing.spec for crossing in plan.trace.crossings.get(stage.end, ())]
    if stage.rank == mesh.get_local_rank():
        try:
            found = forward.run(stage.first, stage.end, plan.inputs, plan.trace, received)
            given = [TensorSpec(one.shape, one.dtype) for one in found] if specs else specs
            if given != specs or (specs and not all(map(_has_numbers, found))):
                problem = _not_the_same(forward.model, stage, "what it sends is another tensor")
        except LayoutError as error:
            problem = error
        except Exception as error:
            problem = _not_the_same(forward.model, stage, named(error))
    _raise_everywhere(problem, stage, mesh)
    if not specs:
        return found
    device = next(forward.model.parameters()).device
    sent = found if found is not None else [spec.zeros(device) for spec in specs]
    sent = [one.contiguous() for one in sent]
    for tensor in sent:
        dist.broadcast(tensor, group=mesh.get_group(), group_src=stage.rank)
    return tuple(sent)


def _has_numbers(tensor: torch.Tensor) -> bool:
    """Return whether it is none of a trace, which a block has kept where no one saw it."""
    return not torch_fakes.is_fake(tensor)


def _raise_everywhere(problem: LayoutError | None, stage: Stage, mesh: DeviceMesh) -> None:
    told = [problem]
    dist.broadcast_object_list(told, group=mesh.get_group(), group_src=stage.rank)
    if told[0] is not None:
        raise told[0]


def _real(tree: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor) and t.is_floating_point()]


def _is_near(a: torch.Tensor, b: torch.Tensor) -> bool:
    bound = TOLERANCE.get(a.dtype, 1e-4) * float(a.abs().max() if a.numel() else 1)
    return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=bound, equal_nan=True)


def _not_the_same(model: nn.Module, stage: Stage, what: str) -> LayoutError:
    first = stage.blocks[0]
    return LayoutError(
        f"{type(model).__name__}, cut before {first}, does not compute the same.",
        why=f"something of earlier stages reaches it in a way that is not seen ({what})",
        do='let modules be called with tensors and return them; "zero3" cuts any model',
    )


def _empty(
    model: nn.Module,
    kept: Collection[str],
    elsewhere: Collection[str],
    run_here: Collection[str],
    device_type: str,
) -> None:
    """Remove the weights of other ranks, in place: names and classes stay.

    A weight that is not here is a plain tensor of zeros, one number spread over the shape: code
    that asks for its shape, dtype or device gets them, and `parameters()` and `state_dict()` hold
    this rank's weights.

    Args:
        model: Its parameters.
        kept: Names of the parameters that stay.
        elsewhere: Names of modules that do not run here: their buffers are removed too, but those
            of modules that are also in others, as VeRA's matrices are in all layers.
        run_here: Names of modules that do, which may be parts of those.
        device_type: Where weights on meta will be.
    """
    stay = {id(model.get_parameter(name)) for name in kept}
    for _, module in model.named_modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and id(parameter) not in stay:
                del module._parameters[name]
                vars(module)[name] = _shape_of(parameter, device_type)
    roots = {id(model.get_submodule(path)) for path in elsewhere}
    here = _reached(model, roots, set())
    here |= {id(part) for path in run_here for part in model.get_submodule(path).modules()}
    for path in elsewhere:
        for module in model.get_submodule(path).modules():
            for name, buffer in list(module._buffers.items()):
                if buffer is not None and id(module) not in here:
                    del module._buffers[name]
                    vars(module)[name] = _shape_of(buffer, device_type)


def _reached(module: nn.Module, without: set[int], seen: set[int]) -> set[int]:
    """Return the ids of the modules in `module`, those that are in `without` alone left out."""
    if id(module) not in without and id(module) not in seen:
        seen.add(id(module))
        for child in module.children():
            _reached(child, without, seen)
    return seen


def _shape_of(tensor: torch.Tensor, device_type: str) -> torch.Tensor:
    device = device_type if tensor.is_meta else tensor.device
    return torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape)
