"""The places inside torch where the tap and the training hooks look on.

One of the modules that hold what nbdist uses of torch's private parts; see `torch_groups.py`. Every
function that puts something in place returns a function that takes it out again. `check()`
says what a new torch has moved. Tried with torch 2.13.0 and 2.15.0 (CPU).
"""

import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, wraps
from time import thread_time_ns
from types import FrameType, FunctionType
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
import torch.utils.data.dataloader as dataloader
from torch.optim import optimizer as optim_hooks
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from nbdist.engine.compat.cuda_graphs import graphs

_torch: Any = torch  # for names that its types do not tell

_GLOBAL_STEP_HOOKS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")

Undo = Callable[[], None]
Closure = Callable[[], Any]
StepArgs = tuple[Any, ...]
StepKeywords = dict[str, Any]
Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]

unbox_group = c10d.ProcessGroup.unbox
native_work_wait = c10d.Work.wait  # as torch made it, whatever is put around it later


def check() -> list[str]:
    """Return what this torch lacks of what the tap and the training hooks use."""
    wanted = [
        (c10d.ProcessGroup, ["unbox", "_get_backend", "group_name"]),
        (torch.ScriptObject, ["_get_method"]),
        (c10d.Work, ["wait", "boxed", "get_future", "is_completed"]),
        *((owner, [name]) for owner, name in _WAITING_IN_NATIVE),
        (torch.library.Library, ["impl", "_destroy"]),
        (dataloader, ["_BaseDataLoaderIter", "_MultiProcessingDataLoaderIter"]),
        (torch.amp.GradScaler, ["scale"]),
        (torch._C, ["_dispatch_get_all_op_names", "_current_graph_task_id"]),
        (torch.autograd.graph, ["_engine_run_backward"]),
        (torch.profiler.profile, ["prepare_trace"]),
        (torch.autograd, ["_profiler_enabled"]),
        (optim_hooks, [*_GLOBAL_STEP_HOOKS]),
        (c10d._world, ["pg_coalesce_state"]),
        (torch, ["_disable_dynamo"]),
        (torch._C._dynamo.eval_frame, ["set_code_exec_strategy", "_FrameExecStrategy"]),
    ]
    return [
        f"torch {torch.__version__}: {getattr(owner, '__name__', owner)}.{name} is gone"
        for owner, names in wanted
        for name in names
        if not hasattr(owner, name)
    ]


def collective_ops() -> set[str]:
    """Return the names of all `c10d::` operators of the installed torch."""
    return set(_COLLECTIVE_OPS)


# Asked for here, which ranks that are forked do once for all: it takes 5 ms. `check` says if it is
# gone.
_all_op_names: Callable[[], list[str]] = getattr(torch._C, "_dispatch_get_all_op_names", list)
_COLLECTIVE_OPS = frozenset(
    name.split("::")[1].split(".")[0] for name in _all_op_names() if name.startswith("c10d::")
)


def place_kernels(kernels: Mapping[str, Callable[..., Any]], device: str) -> Undo:
    """Let Python functions carry out the `c10d` operators of these names on one kind of device.

    They are called with the GIL held and see each collective of the process: the Python API,
    DDP's reducer in C++, FSDP and functional collectives all pass the dispatcher.
    """
    library: Any = torch.library.Library("c10d", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this replaces torch's own kernels is the purpose
        for name, kernel in kernels.items():
            library.impl(name, kernel, device.upper())
    undo: Undo = library._destroy
    return undo


@lru_cache(maxsize=1)
def _nothing() -> tuple[Callable[..., Any], Any]:
    """Return an operator with a collective's arguments whose Python kernel does nothing."""
    library: Any = torch.library.Library("nbdist", "DEF")
    classes = "__torch__.torch.classes.c10d"
    library.define(
        f"nothing(Tensor[] t, {classes}.ProcessGroup g, bool a) -> (Tensor[], {classes}.Work)"
    )
    work = finished_work().boxed()
    library.impl("nothing", lambda *args: (args[0], work), "CompositeExplicitAutograd")
    return torch.ops.nbdist.nothing.default, library  # it lives as long as its library


def price_of_launch(group: Any) -> int:
    """Return the nanoseconds that torch takes to call Python for a collective and to return.

    Asked within one, whose caches are as they are. From Python each argument and each result of an
    operator is converted twice, by the caller and for the kernel: half of the time is the price.
    """
    operator, _ = _nothing()
    tensors = [torch.empty(0)]
    began_ns = thread_time_ns()
    operator(tensors, group, True)
    return (thread_time_ns() - began_ns) // 2


def keep_uncompiled(function: Callable[..., Any]) -> None:
    """Have `torch.compile` leave a function, and what it calls, as they are, where torch calls it.

    What `torch.compiler.disable` does, without a frame of its own and without importing Dynamo,
    which takes 0.7 s.
    """
    frames: Any = torch._C._dynamo.eval_frame
    skip, plain = frames._FrameAction.SKIP, cast(FunctionType, function)
    frames.set_code_exec_strategy(plain.__code__, frames._FrameExecStrategy(skip, skip))


def left_alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` as `torch.compile` leaves it alone where compiled code calls it, as well.

    What `torch.compiler.disable` returns, which imports Dynamo at once and not at the first call.
    """
    keep_uncompiled(function)
    alone: Callable[..., Any] = _torch._disable_dynamo(function)
    return alone


def compiles_exchanges() -> bool:
    """Return whether compiled code exchanges parts of sequences rightly: torch 2.11's does not.

    There a tensor that is received within a backward keeps what it held before, silently.
    """
    return bool(torch.__version__ >= "2.13")


def left_alone_where_wrong(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, left alone by `torch.compile` where that would exchange wrongly."""
    return function if compiles_exchanges() else left_alone(function)


def worker_count(group: dist.ProcessGroup) -> int:
    """Return on how many threads the group's backend for the CPU works; 0 where it is not gloo."""
    try:
        backend: Any = group._get_backend(torch.device("cpu"))
    except RuntimeError:  # none for the CPU
        return 0
    return int(backend.options._threads) if is_gloo(backend) else 0


def is_gloo(backend: Any) -> bool:
    """Return whether a backend is gloo's, and nothing is wrapped around it."""
    return _GLOO is not None and isinstance(backend, _GLOO)


def is_over_gloo(backend: Any) -> bool:
    """Return whether a backend is gloo's, also within the wrapper of TORCH_DISTRIBUTED_DEBUG."""
    return is_gloo(getattr(backend, "wrapped_pg", backend))


_GLOO: Any = getattr(c10d, "ProcessGroupGloo", None)


def future_of(work: Any) -> Any:
    """Return a Work's future; None where its backend gives none."""
    try:
        return work.get_future()
    except RuntimeError:
        return None


def is_coalescing() -> bool:
    """Return whether a program is within a coalescing manager: what it launches is queued later."""
    return bool(c10d._world.pg_coalesce_state)


def work_after(work: Any, then: Callable[[], object]) -> Any:
    """Return a Work that is over when `work` is and `then` has been done, on the backend's thread.

    Who waits for it gets the error of `work`.
    """

    def finish(future: Any) -> Any:
        value = future.value()
        then()
        return value

    return _create_work(work.get_future().then(finish))


def reduction_of(argument: Any) -> int:
    """Return the reduction's number that an operator's argument holds."""
    # As `argument.op()`, whose attribute takes a microsecond more to be found.
    return int(_method_of(argument, "op")())


_method_of: Any = torch.ScriptObject._get_method


def reduce_op(kind: int) -> Any:
    """Return the `ReduceOp` of Python from its number, as `op()` of an operator's argument gives.

    Raises:
        NotImplementedError: `PREMUL_SUM`, whose factor torch does not hand out.
    """
    if kind == _PREMUL_SUM:
        raise NotImplementedError(
            "PREMUL_SUM does not pass the tap on collectives; set c.NBDist.tap = 'off' to use it."
        )
    return _REDUCE_OPS[kind]


_members: dict[str, Any] = dist.ReduceOp.RedOpType.__members__  # type: ignore[assignment]
_PREMUL_SUM = int(_members["PREMUL_SUM"])
_REDUCE_OPS = {
    int(kind): dist.ReduceOp(kind)
    for name, kind in _members.items()
    if name not in ("PREMUL_SUM", "UNUSED")
}


def _replace(owner: Any, name: str, wrapper: Wrapper) -> Undo:
    native = getattr(owner, name)
    ours = wrapper(native)
    setattr(owner, name, ours)

    def undo() -> None:
        if getattr(owner, name) is ours:  # else somebody wrapped it once more, and still calls us
            setattr(owner, name, native)

    return undo


def wrap_work_wait(wrapper: Wrapper) -> Undo:
    """Put `wrapper` around `Work.wait`, as called from Python."""
    return _replace(c10d.Work, "wait", wrapper)


# They launch collectives and wait for them in C++: those of DDP's forward and constructor.
_WAITING_IN_NATIVE: tuple[tuple[Any, str], ...] = (
    (getattr(dist, "Reducer", None), "_rebuild_buckets"),
    (dist, "_broadcast_coalesced"),
    (dist, "_verify_params_across_processes"),
)


def wrap_waits_in_native(wrapper: Wrapper) -> Undo:
    """Put `wrapper` around each function that waits in C++ for what it has launched itself.

    DDP's rebuilding of its buckets, what sends its parameters and buffers from rank 0, and what
    compares the shapes of its parameters. The reducer's backward is not one of them.
    """
    undos = [_replace(owner, name, wrapper) for owner, name in _WAITING_IN_NATIVE]

    def undo() -> None:
        for each in undos:
            each()

    return undo


def wrap_wait_tensor(wrapper: Wrapper) -> Undo:
    """Put `wrapper` around the wait of functional collectives (DTensor's among them)."""
    import torch.distributed._functional_collectives as funcol

    return _replace(funcol, "wait_tensor", wrapper)


def wrap_backward(wrapper: Wrapper) -> Undo:
    """Put `wrapper` around `torch.autograd.backward`, which `Tensor.backward` calls too."""
    return _replace(torch.autograd, "backward", wrapper)


def has_compiled() -> bool:
    """Return whether `torch.compile` has compiled code of this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    counters: Any = {} if utils is None else getattr(utils, "counters", {})
    return bool(counters.get("frames"))


def is_in_backward() -> bool:
    """Return whether the calling thread runs a backward, its hooks and callbacks included."""
    return _graph_task() >= 0


_graph_task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)


def calls_backward(frame: FrameType | None) -> bool:
    """Return whether a backward was called from within this frame, or from one that it called."""
    while frame is not None:
        if frame.f_code is _RUN_BACKWARD:
            return True
        frame = frame.f_back
    return False


# From it Python calls autograd's engine, for both `backward` and `grad`.
_run_backward: Any = getattr(torch.autograd.graph, "_engine_run_backward", None)
_RUN_BACKWARD = getattr(_run_backward, "__code__", None)


def wrap_next_batch(wrapper: Wrapper) -> Undo:
    """Put `wrapper` around `next()` on a DataLoader's iterator, of every kind."""
    return _replace(dataloader._BaseDataLoaderIter, "__next__", wrapper)


def wrap_start_workers(wrapper: Wrapper) -> Undo:
    """Put `wrapper` around what makes the iterator of a DataLoader with workers."""
    return _replace(dataloader._MultiProcessingDataLoaderIter, "__init__", wrapper)


def batch_number(iterator: Any) -> int:
    """Return how many batches a DataLoader's iterator has given in this pass."""
    return int(iterator._num_yielded)


def sampler_of(iterator: Any) -> Any:
    """Return the sampler of a DataLoader's iterator, that of single samples; None without one."""
    batches = getattr(iterator, "_index_sampler", None)
    return getattr(batches, "sampler", batches)


def dataset_of(iterator: Any) -> Any:
    """Return the dataset that a DataLoader's iterator reads."""
    return getattr(iterator, "_dataset", None)


def batch_count(iterator: Any) -> int | None:
    """Return how many batches one pass of a DataLoader's iterator gives, if it knows."""
    try:
        return len(iterator)
    except TypeError:  # an iterable dataset without a length
        return None


def remember_unscaled() -> Undo:
    """Let `unscaled` find the loss behind what `GradScaler.scale` returned."""

    def around(native: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(native)
        def scale(self: Any, outputs: Any) -> Any:
            scaled = native(self, outputs)
            if isinstance(scaled, torch.Tensor) and scaled is not outputs:
                here.remember(scaled, outputs)
            return scaled

        return scale

    return _replace(torch.amp.GradScaler, "scale", around)


class ScaledLosses:
    """The losses that GradScalers of a process have scaled.

    Attributes:
        count: How many so far.
    """

    def __init__(self) -> None:
        self.count = 0

    def remember(self, scaled: Any, loss: torch.Tensor) -> None:
        """Note a loss that was scaled, on the one that it has become."""
        self.count += 1
        scaled._nbdist_unscaled = loss.detach()


def count_of_scaled() -> int:
    """Return how many losses GradScalers have scaled so far."""
    return here.count


def unscaled(loss: torch.Tensor) -> torch.Tensor:
    """Return the loss before a GradScaler scaled it, or the loss itself."""
    if not here.count:
        return loss
    found = getattr(loss, "_nbdist_unscaled", loss)
    assert isinstance(found, torch.Tensor)
    return found


def local_scalar(loss: torch.Tensor) -> torch.Tensor | None:
    """Return this rank's value of a DTensor loss; None where only a collective could tell it."""
    if type(loss) is torch.Tensor or (placements := getattr(loss, "placements", None)) is None:
        return loss
    if all(placement.is_replicate() for placement in placements):
        local = loss.to_local()  # type: ignore[attr-defined]
        assert isinstance(local, torch.Tensor)
        return local
    return None


def on_optimizer_step(
    hook: Callable[[torch.optim.Optimizer, StepArgs, StepKeywords], None],
) -> Undo:
    """Call `hook` after every `step()` of every `torch.optim` optimizer of the process.

    It gets the optimizer and the arguments of `step`, among them the optimizer once more. Of a step
    that is captured in a CUDA graph it is called after each replay.
    """
    outside, forget = graphs.after_steps(hook)
    return _both(register_optimizer_step_post_hook(outside).remove, forget)


def before_optimizer_step(
    hook: Callable[
        [torch.optim.Optimizer, StepArgs, StepKeywords], tuple[StepArgs, StepKeywords] | None
    ],
) -> Undo:
    """Call `hook` before every `step()` of every `torch.optim` optimizer of the process.

    It gets what that of `on_optimizer_step` gets; what it returns, if anything, `step` gets instead
    (`with_closure`).
    """
    outside, forget = graphs.before_steps(hook)
    return _both(register_optimizer_step_pre_hook(outside).remove, forget)


def before_plain_step(
    hook: Callable[
        [torch.optim.Optimizer, StepArgs, StepKeywords], tuple[StepArgs, StepKeywords] | None
    ],
) -> Undo:
    """Call `hook` as `before_optimizer_step` does, also while a graph captures, at no replay."""
    return register_optimizer_step_pre_hook(hook).remove


def _both(first: Undo, second: Undo) -> Undo:
    def undo() -> None:
        first()
        second()

    return undo


def closure_of(args: StepArgs, kwargs: StepKeywords) -> Closure | None:
    """Return the closure that an optimizer's `step` was given with these arguments."""
    given: Closure | None = args[1] if len(args) > 1 else kwargs.get("closure")
    return given


def with_closure(
    args: StepArgs, kwargs: StepKeywords, closure: Closure
) -> tuple[StepArgs, StepKeywords]:
    """Return the arguments of a `step` that was given a closure, with another one."""
    if len(args) > 1:
        return (args[0], closure, *args[2:]), kwargs
    return args, kwargs | {"closure": closure}


def wrap_prepare_profiler(wrapper: Wrapper) -> Undo:
    """Put `wrapper` around what every `torch.profiler.profile` does before it records."""
    return _replace(torch.profiler.profile, "prepare_trace", wrapper)


def is_profiled() -> bool:
    """Return whether a profiler records this thread."""
    return bool(torch.autograd._profiler_enabled())


def is_flat_shard(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is a piece of FSDP1's flat ones: who holds which, is unknown."""
    return hasattr(parameter, "_fsdp_flattened")


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor: of a DTensor its part, else all. No collective."""
    local = getattr(tensor, "_local_tensor", tensor)
    assert isinstance(local, torch.Tensor)
    return local


def finished_work() -> Any:
    """Return a Work that is over.

    Stands for the null that NCCL's backend returns of a launch that needs no wait on the host:
    an operator carried out in Python must return a Work.
    """
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    future.set_result([])
    return _create_work(future)


_create_work: Any = torch._C._distributed_c10d._create_work_from_future  # type: ignore[attr-defined]


def let_run_hooks(kind: type) -> None:
    """Have a class of optimizers run hooks at its steps, as torch does when it makes the first.

    Before anything refers to the class's `step`: torch replaces it.
    """
    if issubclass(kind, torch.optim.Optimizer):
        kind._patch_step_function(object.__new__(kind))


def step_without_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer step without a word to those who count steps. Main thread.

    Also where its step calls that of its base class, or of an optimizer inside it, each of which
    torch has made to run the hooks.
    """
    with _without_global_hooks():
        _native_step(optimizer)(optimizer)


def with_quiet_bases(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Return a class whose step, as that of `kind`, runs no hooks where it calls its base's step.

    Classes of which each is that of a base, but for the hooks, come between the bases.
    """
    hooked = [base for base in kind.__mro__[1:] if _is_hooked(vars(base).get("step"))]
    return _quiet((kind, *hooked)) if hooked else kind


@lru_cache(maxsize=32)
def _quiet(kinds: tuple[Any, ...]) -> type[torch.optim.Optimizer]:
    kind, *hooked = kinds
    bases = (type(b.__name__, (b,), {"step": b.step.__wrapped__}) for b in hooked)
    return type(kind.__name__, (kind, *bases), {"__module__": kind.__module__})


@contextmanager
def _without_global_hooks() -> Iterator[None]:
    # Others in their place: torch may be in the midst of running them.
    kept = {name: getattr(optim_hooks, name) for name in _GLOBAL_STEP_HOOKS}
    vars(optim_hooks).update({name: OrderedDict() for name in kept})
    try:
        yield
    finally:
        vars(optim_hooks).update(kept)


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer has hooks of its own on its steps."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def _native_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    # torch replaces a class's `step` by one that runs the hooks, and marks it so.
    step: Any = type(optimizer).step
    native: Callable[..., Any] = step.__wrapped__ if _is_hooked(step) else step
    return native


def _is_hooked(step: Any) -> bool:
    return getattr(step, "hooked", False)


here = ScaledLosses()
