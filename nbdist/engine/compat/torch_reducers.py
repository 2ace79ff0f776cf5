"""Private parts of torch inside DDP's reducer: its buckets, made again or reset.

One of the modules that hold what nbdist uses of torch's private parts; see `torch_groups.py`.
`check()` says what broke when a version moves. Tried with torch 2.13.0 and 2.15.0 (CPU).

A reducer begins with the buckets it is made with. In the forward after its first whole backward it
rebuilds them, once, in the order in which gradients came: rank 0 broadcasts its own. Other buckets
mean another order of summation, and ranks must have the same ones.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from nbdist.engine.compat.lacking import lacking

_dist: Any = dist  # for names that its types do not tell


def check() -> list[str]:
    """Return what this torch lacks of what we use, in words; empty when all is there."""
    from torch._C._distributed_c10d import Logger, Reducer

    broken = lacking(
        Reducer,
        [
            "_reset_state",
            "_set_static_graph",
            "_remove_autograd_hooks",
            "_check_reducer_finalized",
            "_get_zeros_like_grad_buckets",
            "_set_ddp_runtime_logging_sample_rate",
        ],
        "DDP's reducer",
    )
    broken += lacking(Logger, ["set_runtime_stats_and_log"], "DDP's logger")
    broken += lacking(
        DistributedDataParallel,
        [
            "_build_params_for_reducer",
            "_build_debug_param_to_name_mapping",
            "_ddp_init_helper",
            "_get_ddp_logging_data",
        ],
        "DistributedDataParallel",
    )
    broken += lacking(
        dist, ("_register_comm_hook", "_compute_bucket_assignment_by_size"), "torch.distributed"
    )
    return [f"torch {torch.__version__}: {what}" for what in broken]


# ---- What is averaged: the parameters that a reducer was made for ------------------------------


_FOLLOWS = "_nbdist_follows_trained"  # on the module, with which it comes to a new rank


def follow_trained(module: DistributedDataParallel) -> None:
    """Note which parameters each reducer of a layout's module is made for: those then trained.

    A forward makes it again where others are. Nothing does that for a module of the user's own.
    """
    setattr(module, _FOLLOWS, True)
    here.note_made(module, _trained(module))


def forget_trained(module: DistributedDataParallel) -> None:
    """Have a layout's module take its reducer for one that was made for other parameters."""
    here.note_made(module, [])


def made_for(module: DistributedDataParallel) -> str:
    """Return a text for comparison: which parameters a reducer was made for, and which are trained.

    It is "" where it is not known.
    """
    known = here.made_for(module)
    return "" if known is None else _flags(known) + f" {_flags(_trained(module))}"


def _flags(are_trained: list[bool]) -> str:
    return "".join(str(int(is_trained)) for is_trained in are_trained)


def is_to_be_remade(module: DistributedDataParallel) -> bool:
    """Return whether the next forward makes a layout's reducer again."""
    return here.made_for(module) is not None and trains_others(module)


def trains_others(module: DistributedDataParallel) -> bool:
    """Return whether other parameters are trained now than those that the reducer was made for.

    Not where none is trained: there is nothing to average.
    """
    now = _trained(module)
    return now != here.made_for(module) and any(now)


def changed(module: DistributedDataParallel) -> list[torch.Tensor]:
    """Return the parameters that were frozen or thawed since the reducer was made."""
    before = here.made_for(module) or []
    parameters: Any = module._module_parameters
    return [p for p, was in zip(parameters, before, strict=False) if p.requires_grad != was]


def _trained(module: DistributedDataParallel) -> list[bool]:
    parameters: Any = module._module_parameters
    return [parameter.requires_grad for parameter in parameters]


# ---- Reset and made again -----------------------------------------------------------------------


Buckets = list[list[int]]  # indices of parameters, as DDP counts them; first to be sent first


class Reducers:
    """What is known of the reducers of a process, as long as they live.

    Attributes:
        remade: How many have been built beside those of constructors.
    """

    def __init__(self) -> None:
        self.remade = 0
        # Whether each parameter was trained when a reducer was made, of a layout's module.
        self._made_for: WeakKeyDictionary[Any, list[bool]] = WeakKeyDictionary()
        # With which buckets one began, where these were not the constructor's.
        self._began_with: WeakKeyDictionary[Any, Buckets] = WeakKeyDictionary()

    def note_made(self, module: DistributedDataParallel, trained: list[bool]) -> None:
        """Note for which parameters the reducer of a layout's module is made."""
        if hasattr(module, _FOLLOWS):
            self._made_for[module.reducer] = trained

    def note_built(self, module: DistributedDataParallel, buckets: Buckets | None) -> None:
        """Note a module's new reducer, and the buckets that it was given."""
        self.note_made(module, _trained(module))
        if buckets is not None:
            self._began_with[module.reducer] = buckets

    def made_for(self, module: DistributedDataParallel) -> list[bool] | None:
        """Return for which parameters the module's reducer was made; None where not known."""
        return self._made_for.get(module.reducer)

    def began_with(self, module: DistributedDataParallel) -> Buckets | None:
        """Return the buckets that it was given."""
        return self._began_with.get(module.reducer)


def reset_ddp(module: DistributedDataParallel) -> None:
    """Let the reducer forget a backward that did not end; its buckets stay, to be rebuilt."""
    module.reducer._reset_state()
    module._has_rebuilt_buckets = False


def is_unfinished(module: DistributedDataParallel) -> bool:
    """Return whether a backward has begun that the reducer still waits in for gradients."""
    try:
        module.reducer._check_reducer_finalized()
    except RuntimeError:
        return True
    return False


def remake_reducer(module: DistributedDataParallel, buckets: Buckets | None = None) -> None:
    """Give a DDP a new reducer, as its constructor does, with its hooks. No collective."""
    builtin = builtin_hook_of(module)
    module.reducer._remove_autograd_hooks()
    build_reducer(module, builtin, buckets)


def remade() -> int:
    """Return how many reducers have been built beside those of constructors."""
    return here.remade


def build_reducer(
    module: DistributedDataParallel, builtin: str | None, buckets: Buckets | None = None
) -> None:
    """Build the reducer of a DDP that has none, and register its hooks. No collective.

    Args:
        module: Its hooks written in Python are those it lists.
        builtin: From `builtin_hook_of`.
        buckets: By itself the constructor's; so where they are not of what is trained now.
    """
    here.remade += 1
    with _some_trained(module):
        _build_reducer(module, builtin, buckets)


def _build_reducer(ddp: Any, builtin: str | None, buckets: Buckets | None) -> None:
    parameters, expect_sparse = ddp._build_params_for_reducer()
    names = ddp._build_debug_param_to_name_mapping(parameters)
    places = sorted(place for bucket in buckets or () for place in bucket)
    buckets = buckets if places == list(range(len(parameters))) else None
    with _assigned(buckets, ddp.bucket_bytes_cap):
        ddp._ddp_init_helper(parameters, expect_sparse, names, ddp.static_graph)
    ddp._has_rebuilt_buckets = False
    here.note_built(ddp, buckets)
    if ddp.static_graph:
        # A new reducer learns the graph in its first iteration, and reduces at its end.
        ddp._static_graph_delay_allreduce_enqueued = False
        ddp.reducer._set_static_graph()
        ddp.logger._set_static_graph()
    if ddp.mixed_precision is not None:
        ddp.reducer._set_mixed_precision_param_dtype(ddp.mixed_precision.param_dtype)
    for hook, state in ddp._comm_hooks:
        ddp.logger._set_comm_hook_name(hook.__qualname__)
        _dist._register_comm_hook(ddp.reducer, state, hook)
    if builtin:
        kind = builtin.removeprefix("BuiltinCommHookType.")
        ddp._register_builtin_comm_hook(getattr(_dist.BuiltinCommHookType, kind))


@contextmanager
def _some_trained(module: DistributedDataParallel) -> Iterator[None]:
    """Have all parameters trained meanwhile where none is: a reducer is made for one at least."""
    parameters: Any = module._module_parameters
    frozen = [] if any(_trained(module)) else [p for p in parameters if _can_be_trained(p)]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def _can_be_trained(parameter: torch.Tensor) -> bool:
    return parameter.is_floating_point() or parameter.is_complex()


def builtin_hook_of(module: DistributedDataParallel) -> str | None:
    """Return the name of the hook in C++ that a reducer has, if any; Python ones are in a list."""
    return None if module._comm_hooks else module._get_ddp_logging_data().get("comm_hook")


@contextmanager
def _assigned(buckets: Buckets | None, limit_bytes: int) -> Iterator[None]:
    """Have DDP's own helper, which asks for buckets in the order of parameters, get these."""
    native = _dist._compute_bucket_assignment_by_size

    def assignment(*args: Any) -> tuple[list[list[int]], list[int]]:
        if buckets is None:
            made: tuple[list[list[int]], list[int]] = native(*args)
            return made
        return buckets[::-1], [limit_bytes] * len(buckets)

    _dist._compute_bucket_assignment_by_size = assignment
    try:
        yield
    finally:
        _dist._compute_bucket_assignment_by_size = native


def move_ddp(module: Any, group: dist.ProcessGroup) -> None:
    """Let a DDP average over another group from here on; its hooks stay. No collective."""
    module.process_group = group
    module._lazy_init_ran = False
    remake_reducer(module)


# ---- Buckets -----------------------------------------------------------------------------------


def has_reducer(module: DistributedDataParallel) -> bool:
    """Return whether a DDP has one: not where the program has all gradients delayed."""
    return hasattr(module, "reducer")


def has_gradients(module: DistributedDataParallel) -> bool:
    """Return whether the reducer has begun a backward, whose gradients are still there.

    Reads no more than Python's attributes: an optimizer that steps within backward may ask, when
    the reducer is locked.
    """
    if module.static_graph and not module._static_graph_delay_allreduce_enqueued:
        return False
    return any(parameter.grad is not None for parameter in module._module_parameters)


def has_rebuilt_buckets(module: DistributedDataParallel) -> bool:
    """Return whether the reducer has rebuilt its buckets since it was made or reset.

    It does so once, in the forward that follows the first whole backward.
    """
    return bool(module._has_rebuilt_buckets)


def began_with(module: DistributedDataParallel) -> Buckets | None:
    """Return the buckets that the module's reducer was made with; None for the constructor's."""
    return here.began_with(module)


def buckets_of(module: DistributedDataParallel) -> Buckets | None:
    """Return the buckets that the reducer has now. Makes zeros of the gradients' size meanwhile.

    None where a parameter was frozen or made trainable after the module was wrapped.
    """
    ddp: Any = module
    parameters, _ = ddp._build_params_for_reducer()
    place = {id(parameter): index for index, parameter in enumerate(parameters)}
    found: Buckets = [
        [place.get(id(parameter), -1) for parameter in bucket.parameters()]
        for bucket in ddp.reducer._get_zeros_like_grad_buckets()
    ]
    is_whole = sorted(index for bucket in found for index in bucket) == list(range(len(parameters)))
    return found if is_whole else None


def buckets_to_come(module: DistributedDataParallel) -> Buckets | None:
    """Return the buckets that the reducer will lay in the next forward, as rank 0 would tell them.

    They follow the order in which the last whole backward has made the gradients. None where there
    was none, or where torch does not tell of it (on devices for which it has no clock).
    """
    ddp: Any = module
    parameters, expect_sparse = ddp._build_params_for_reducer()
    order = _order_of_gradients(module)
    if sorted(order) != list(range(len(parameters))):
        return None
    in_order = [parameters[index] for index in order]
    limits = [_first_bucket_bytes(module), ddp.bucket_bytes_cap]
    if hasattr(ddp, "_bucket_config"):
        _, given = ddp._bucket_config.compute_bucket_size_limits(
            static_graph=ddp.static_graph, find_unused_parameters=ddp.find_unused_parameters
        )
        limits = given or limits
    made: tuple[Buckets, list[int]] = _dist._compute_bucket_assignment_by_size(
        in_order, limits, expect_sparse, order
    )
    return made[0]


def lays_anew(module: DistributedDataParallel) -> bool:
    """Return whether a reducer rebuilds its buckets at all: not where gradients may be missing."""
    return bool(module.static_graph or not module.find_unused_parameters)


_SAMPLE_RATE = 100  # torch's own: of so many iterations it notes one


def _order_of_gradients(module: DistributedDataParallel) -> list[int]:
    """Return the indices of parameters in the order in which the last backward had gradients."""
    reducer: Any = module.reducer
    reducer._set_ddp_runtime_logging_sample_rate(1)
    module.logger.set_runtime_stats_and_log()  # type: ignore[union-attr]
    reducer._set_ddp_runtime_logging_sample_rate(_SAMPLE_RATE)
    indices = module._get_ddp_logging_data().get("prev_iteration_grad_ready_order_indices", "")
    return [int(index) for index in indices.split(", ") if index]


def first_bucket_mb(module: DistributedDataParallel) -> tuple[float, float]:
    """Return (MB of a module's gradients, MB that its first bucket takes of them)."""
    size = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
    return size / 2**20, _first_bucket_bytes(module) / 2**20


def _first_bucket_bytes(module: Any) -> int:
    if hasattr(module, "_bucket_config"):
        return int(module._bucket_config.first_bucket_bytes_cap)
    # torch 2.11
    if module.bucket_bytes_cap_default:
        first: int = vars(dist)["_DEFAULT_FIRST_BUCKET_BYTES"]
        return first
    return int((*module.bucket_bytes_cap_list, module.bucket_bytes_cap)[0])


here = Reducers()
