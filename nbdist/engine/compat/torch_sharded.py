"""Private parts of torch inside sharded modules: `fully_shard` and FullyShardedDataParallel.

One of the modules that hold what nbdist uses of torch's private parts; see `torch_groups.py`.
`check()` says what broke when a version moves. Tried with torch 2.13.0 and 2.15.0 (CPU);
`fully_shard` with its own `_reset_iter_state`, and with ours for 2.11, which lacks it.
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import wraps
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy
from torch.distributed.tensor import debug

from nbdist.engine.compat import torch_live
from nbdist.engine.compat.lacking import lacking


def as_own(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as a tensor that autograd does not take for a view.

    What leaves a unit of fsdp as a view loses its hook when a program changes it in place, of which
    torch warns.
    """
    return torch.ops.aten._unsafe_view(tensor, tensor.shape)  # type: ignore[no-any-return]


def assert_there(holds: torch.Tensor) -> None:
    """Have a GPU stop with an assertion where this is false, when it comes to it: nothing waits."""
    torch._assert_async(holds)


def forget_results() -> None:
    """Forget which result operators on DTensors have: each is remembered with the mesh it had.

    A mesh with the same ranks and names is taken for that one, and the result has its groups.
    """
    debug._clear_sharding_prop_cache()


def check() -> list[str]:
    """Return what this torch lacks of what we use, in words; empty when all is there."""
    return [f"torch {torch.__version__}: {what}" for what in _broken()]


def _broken() -> list[str]:
    from torch.distributed import _composable_state
    from torch.distributed.fsdp import _runtime_utils
    from torch.distributed.fsdp._flat_param import FlatParamHandle
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    broken = lacking(torch, ["_assert_async"], "torch")
    broken += lacking(_composable_state, ["_module_state_mapping"], "composable state")
    broken += lacking(
        FSDPParamGroup,
        ["_to_sharded", "is_sharded", "post_backward", "reshard"],
        "fully_shard's parameter group",
    )
    broken += lacking(FSDPParam, ["to_sharded"], "fully_shard's parameter")
    broken += lacking(FSDPState, [_AT_END, "_lazy_init"], "fully_shard's state")
    for part, name in ((FSDPParam, "_unsharded_param"), (FSDPParamGroup, "reduce_grads")):
        if name not in inspect.getsource(part):
            broken.append(f"fully_shard's {part.__name__} has no {name} any more")
    broken += [
        f"fully_shard's {name} does not take a unit's parameters first any more"
        for name in _SENDS
        if not hasattr(_fsdp_param_group, name)
        or next(iter(inspect.signature(getattr(_fsdp_param_group, name)).parameters))
        != "fsdp_params"
    ]
    if "_param_fqn" not in FSDPParam.__init__.__code__.co_names:
        broken.append("fully_shard's parameters have no name any more")
    broken += lacking(_runtime_utils, ["_reshard"], "FullyShardedDataParallel's runtime")
    broken += lacking(DeviceMesh, ["_flatten", "_concatenate"], "DeviceMesh")
    broken += lacking(FlatParamHandle, ["reshard", "post_reshard"], "FlatParamHandle")
    broken += lacking(debug, ["_clear_sharding_prop_cache"], "operators of DTensors")
    try:
        replicate_sharded_type()
    except (ImportError, AttributeError) as error:
        broken.append(f"replicate of DTensors has moved: {error}")
    return broken


# ---- Meshes, and replicas of a model that tensor parallel has cut ------------------------------


def replicate_sharded(
    module: nn.Module, mesh: DeviceMesh, reduce_dtype: torch.dtype | None
) -> None:
    """Average the gradients of DTensors over a one-dimensional mesh beside theirs, in place.

    DDP's reducer knows no DTensors. This is `fully_shard` without shards: one unit a call.
    Gradients are averaged in `reduce_dtype`; None for their own.
    """
    from torch.distributed._composable.replicate_with_fsdp import replicate

    replicate(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))


def flattened(mesh: DeviceMesh) -> DeviceMesh:
    """Return dims of a mesh as one; made once, and kept by the mesh that they are dims of."""
    return mesh._flatten()


def joined(meshes: list[DeviceMesh]) -> DeviceMesh:
    """Return dims that several meshes of one root have as one mesh. Makes no groups."""
    return DeviceMesh._concatenate(meshes)


def replicate_sharded_type() -> type:
    """Return the class that torch puts before that of a module so replicated."""
    from torch.distributed._composable.replicate_with_fsdp import ReplicateModule

    return ReplicateModule


# ---- fully_shard (FSDP2) -----------------------------------------------------------------------


def live_fsdp2_roots() -> list[tuple[nn.Module, Any]]:
    """Return (module, state) of each live FSDP2 root that has run at least one forward.

    torch keeps a weak table of the modules under its composable wrappers; nothing of ours has to
    be in place before the module is made. Other states of a root are reached through it.
    """
    roots = {id(state): (module, state) for module, state in _fsdp2_states() if state._is_root}
    return list(roots.values())


def live_sharded() -> list[nn.Module]:
    """Return the living modules under FSDP2 and FSDP1, outer and inner ones."""
    return [*(module for module, _ in _fsdp2_states()), *live_fsdp1()]


def unit_dtypes(model: nn.Module) -> list[torch.dtype | None]:
    """Return in which dtype each of a model's FSDP2 units gathers its weights; None: their own."""
    inside = set(model.modules())
    return [state._mp_policy.param_dtype for m, state in _fsdp2_states() if m in inside]


def group_of(module: nn.Module) -> Any:
    """Return the group that a module under FSDP2 or FSDP1 gathers its shards in, if it has one."""
    if isinstance(module, FullyShardedDataParallel):
        return module.process_group
    states = [state for under, state in _fsdp2_states() if under is module]
    groups = [g.mesh_info for state in states for g in _groups_of_state(state)]
    return next((getattr(info, "shard_process_group", None) for info in groups), None)


@dataclass(frozen=True, slots=True)
class Shared:
    """A model that `fully_shard` has cut.

    Attributes:
        module: Its root.
        ranks: Global ranks that average its gradients, in the order of the mesh: each has samples
            of its own.
        compute: In what it computes, where that is not the dtype of its parameters.
    """

    module: nn.Module
    ranks: tuple[int, ...]
    compute: torch.dtype | None


def shared_by(parameters: Iterable[torch.Tensor]) -> Shared | None:
    """Return the FSDP2 model that has some of these parameters, if one has that has run."""
    own = {id(p) for p in parameters}
    for module, state in live_fsdp2_roots():
        for group in _fsdp_param_groups(state):
            held = [param for param in group.fsdp_params if id(param.sharded_param) in own]
            if held:
                ranks = tuple(group.mesh_info.mesh.mesh.flatten().tolist())
                return Shared(module, ranks, held[0].mp_policy.param_dtype)
    return None


def _fsdp2_states() -> list[tuple[nn.Module, Any]]:
    composable = sys.modules.get("torch.distributed._composable_state")
    table = composable._module_state_mapping if composable else {}
    found = [(module, reference()) for module, reference in list(table.items())]
    return [(module, state) for module, state in found if hasattr(state, "_state_ctx")]


_SENDS = ("foreach_all_gather", "foreach_reduce")  # what a unit sends, it sends in these


def wrap_sends(wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Wrap the functions in which a unit gathers its parameters and reduces their gradients.

    Both have first a list of what they send, as `name_in_unit` takes it: of gradients, those that
    a backward has made. Returns a function that takes the wrappers out.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as place

    natives = {name: getattr(place, name) for name in _SENDS if hasattr(place, name)}
    for name, native in natives.items():
        setattr(place, name, wrapper(native))

    def undo() -> None:
        for name, native in natives.items():
            setattr(place, name, native)

    return undo


def watch_frees(freed: Callable[[list[Any]], None]) -> Callable[[], None]:
    """Call `freed` with a unit's parameters before they become shards; returns what ends that."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    native: Any = FSDPParamGroup._to_sharded

    @wraps(native)
    def to_sharded(group: Any) -> None:
        if not group.is_sharded:
            freed(group.fsdp_params)
        native(group)

    FSDPParamGroup._to_sharded = to_sharded  # type: ignore[method-assign]
    return lambda: setattr(FSDPParamGroup, "_to_sharded", native)


def name_in_unit(param: Any) -> str:
    """Return the name of a parameter as its FSDP2 root calls it; "" before the root has run."""
    return getattr(param, "_param_fqn", None) or ""


def gathered(model: nn.Module) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    """Yield what an optimizer sees and what autograd does, of what FSDP2 has gathered."""
    inside = set(model.modules())
    for module, state in _fsdp2_states():
        for group in _groups_of_state(state) if module in inside else ():
            for param in group.fsdp_params:
                if hasattr(param, "_unsharded_param"):
                    yield param.sharded_param, param._unsharded_param


_AT_END = "_root_post_backward_final_callback"  # of a backward, of which units wait for it


def after_backward(called: Callable[[int, Any], None]) -> None:
    """Call `called` after backwards in FSDP2's models that may leave gradients whole, from now on.

    They are those that make a graph (`create_graph`), whose own backward no unit may see, and those
    whose first unit is told to send nothing. It gets a number of the model and a state of it, on
    autograd's thread, when the backward ends.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    native = getattr(FSDPState, _AT_END)

    @wraps(native)
    def ended(state: Any) -> None:
        makes_graph = torch.is_grad_enabled()
        native(state)
        if makes_graph or not _sends(state):
            called(id(state._state_ctx), state)

    setattr(FSDPState, _AT_END, ended)


def _sends(state: Any) -> bool:
    groups = (g for each in state._state_ctx.all_states for g in _groups_of_state(each))
    return all(group.reduce_grads for group in islice(groups, 1))


def trained(state: Any, parameters: set[int]) -> list[tuple[str, bool]]:
    """Return which of these parameters, by `id`, a model has, and whether a gradient is whole yet.

    Args:
        state: One of its units.
        parameters: As an optimizer sees them.
    """
    return [
        (name_in_unit(param), _holds_gradient(param))
        for group in _fsdp_param_groups(state)
        for param in group.fsdp_params
        if id(param.sharded_param) in parameters
    ]


def _holds_gradient(param: Any) -> bool:
    gathered = getattr(param, "_unsharded_param", None)
    kept = getattr(param, "unsharded_accumulated_grad", None)  # torch 2.15 has none
    return kept is not None or (gathered is not None and gathered.grad is not None)


def with_hooks(parameters: set[int]) -> list[str]:
    """Return the names of FSDP2's among these, by `id`, that have hooks of `register_hook`."""
    return [
        name_in_unit(param)
        for _, state in _fsdp2_states()
        for group in _groups_of_state(state)
        for param in group.fsdp_params
        if id(param.sharded_param) in parameters and param.sharded_param._backward_hooks
    ]


def units_with(parameters: set[int]) -> list[Any]:
    """Return FSDP2's groups of parameters that have any of these, by `id`."""
    return [
        group
        for _, state in _fsdp2_states()
        for group in _groups_of_state(state)
        if any(id(param.sharded_param) in parameters for param in group.fsdp_params)
    ]


def reshard_units(units: Iterable[Any]) -> None:
    """Have groups of `units_with` give back what they have gathered."""
    for group in units:
        if not group.is_sharded:
            group.reshard()


def has_hooks(parameter: torch.Tensor) -> bool:
    """Return whether a tensor has hooks that a backward calls, of either kind."""
    held: Any = parameter
    return bool(held._backward_hooks or held._post_accumulate_grad_hooks)


def reset_fsdp2(state: Any) -> None:
    """Let an FSDP2 root and all states under it forget an iteration that did not end."""
    for group in _fsdp_param_groups(state):
        # torch's own reset waits for this gather, whose failure would be raised once more.
        group._all_gather_result = None
    if hasattr(state, "_reset_iter_state"):
        state._reset_iter_state()
    else:
        _reset_fsdp2_by_hand(state)
    for group in _fsdp_param_groups(state):
        _to_sharded(group)
        for param in group.fsdp_params:
            # A gradient that autograd had written and no reduction had taken away: the next
            # backward would add to it.
            if "unsharded_accumulated_grad" in vars(param):  # in torch 2.15 the leaf's own, below
                param.unsharded_accumulated_grad = None
            if hasattr(param, "_unsharded_param"):
                param._unsharded_param.grad = None


def _to_sharded(group: Any) -> None:
    """Let a group and each of its parameters be shards, whatever they say they are.

    An interrupt between two parameters leaves some ahead of their group, which then takes them for
    what it is itself, or a module with the other parameter.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

    for param in group.fsdp_params:
        param.to_sharded()
    group._sharded_state = ShardedState.SHARDED


def _fsdp_param_groups(root: Any) -> list[Any]:
    return [g for state in root._state_ctx.all_states for g in _groups_of_state(state)]


def _groups_of_state(state: Any) -> list[Any]:
    # torch 2.11 has at most one a state.
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group else []


def _reset_fsdp2_by_hand(root: Any) -> None:
    """What `_reset_iter_state` of torch 2.13 does, for 2.11, which lacks it."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    context = root._comm_ctx
    context.all_gather_state = None
    context.post_forward_order.clear()
    if hasattr(context, "reduce_scatter_state"):
        context.reduce_scatter_state = None
    for name in ("reduce_scatter_states", "_last_post_reduce_events"):
        getattr(context, name, {}).clear()
    for state in root._state_ctx.all_states:
        state._training_state = TrainingState.IDLE
        getattr(state, "_modules_to_run_forward", set()).clear()
        for group in _groups_of_state(state):
            for name in (
                "_all_gather_result",
                "_post_reduce_event",
                "_all_reduce_state",
                "_reshard_after_forward_event",
                "_partial_reduce_output",
            ):
                if hasattr(group, name):
                    setattr(group, name, None)
            group._post_forward_indices.clear()
            group._training_state = TrainingState.IDLE
            group._to_sharded()
    root._state_ctx.iter_forward_root = None
    root._state_ctx.post_backward_final_callback_queued = False


def plain_name(module: nn.Module) -> str:
    """Return the name of the class the user wrote: torch's layouts put theirs before it."""
    names = [cls.__name__ for cls in type(module).__mro__]
    skipped = {"DDP": 2, "FSDPModule": 2, "ReplicateModule": 3}
    return names[skipped.get(names[1], 0)]


# ---- FullyShardedDataParallel (FSDP1) ----------------------------------------------------------


def live_fsdp1() -> list[FullyShardedDataParallel]:
    """Return the FullyShardedDataParallel modules that are still alive, outer and inner ones."""
    return torch_live.here.live(FullyShardedDataParallel)


def reset_fsdp1(module: Any) -> None:
    """Let one FullyShardedDataParallel forget an iteration that did not end.

    What its callback at the end of a backward does, but the gradients of that iteration are
    dropped, where the callback hands them to the optimizer.
    """
    from torch.distributed.fsdp._common_utils import TrainingState

    if module._is_root is None:
        return  # has run nothing yet
    module.training_state = TrainingState.IDLE
    module._unshard_event = None
    if module._is_root:
        module._post_backward_callback_queued = False
        module._exec_order_data.next_iter()
    if module._handle:
        _reset_flat_parameter(module, module._handle)


def _reset_flat_parameter(module: Any, handle: Any) -> None:
    from torch.distributed.fsdp._common_utils import HandleTrainingState
    from torch.distributed.fsdp._runtime_utils import _reshard

    flat = handle.flat_param
    flat.grad = None
    # Its existence means: add the next gradient to it.
    flat.__dict__.pop("_saved_grad_shard", None)
    flat._post_backward_called = False
    registered = flat.__dict__.pop("_post_backward_hook_state", None)
    if registered:
        registered[-1].remove()
    handle._training_state = HandleTrainingState.IDLE
    # Also where the parameter is its shard already: a gather that failed leaves the room it took,
    # and FSDP takes that for gathered.
    _reshard(module, handle, True)
    handle._ran_pre_backward_hook = False
    handle._needs_pre_backward_unshard = False
    handle._post_forward_index = None
    handle._prefetched = False


# ---- FSDP2 in a pipeline -------------------------------------------------------------------------


def keep_gradients(root: Any) -> None:
    """Have the backwards that follow gather gradients, whole, and send none."""
    root.set_is_last_backward(False)
    root.set_reshard_after_backward(False)
    root.set_requires_gradient_sync(False)


def reduce_gradients(root: Any) -> None:
    """Reduce into shards what backwards have gathered since `keep_gradients`. Collective.

    What torch's own pipeline stages do after the last micro-batch.
    """
    root.set_is_last_backward(True)
    root.set_reshard_after_backward(True)
    root.set_requires_gradient_sync(True)
    state = root._get_fsdp_state()
    for group in _fsdp_param_groups(state):
        group.post_backward()
    state._root_post_backward_final_callback()


def reshard(root: nn.Module) -> None:
    """Give back what forwards alone have gathered."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def gather_root(root: Any) -> None:
    """Gather what the root's own unit holds, for parts that are called without it. Collective.

    Units find out who is the root when one is called first: it is this one.
    """
    root._get_fsdp_state()._lazy_init()
    root.unshard()
