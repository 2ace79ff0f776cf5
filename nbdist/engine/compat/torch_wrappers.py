"""The places where torch spreads a model or clips its gradients; somebody may object, or look on.

One of the modules that hold what nbdist uses of torch's private parts; see `torch_groups.py`.
Constructors and `FSDPState.init` are replaced, and not `fully_shard` itself: a program has imported
that by its name long before. Tried with torch 2.13.0 and 2.15.0 (CPU).
"""

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import GeneratorType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from nbdist.engine.compat.lacking import lacking

Ask = Callable[[str, nn.Module], None]  # gets who is about to spread which module; may raise


def check() -> list[str]:
    """Return what this torch lacks of what we use, in words; empty when all is there."""
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam  # noqa: F401
        from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
    except ImportError as error:
        return [f"torch {torch.__version__}: fully_shard's state has moved: {error}"]
    return [f"torch {torch.__version__}: {x}" for x in lacking(FSDPState, ["init"], "FSDPState")]


# Gets whose gradients are clipped, and the other arguments; may raise.
AskClip = Callable[[list[torch.Tensor], tuple[Any, ...], dict[str, Any]], None]
# Gets whose were, to which norm at most, and what their norm was.
Clipped = Callable[[list[torch.Tensor], float, torch.Tensor], None]


def _accept(_by: str, _module: nn.Module) -> None:
    """Accept whatever spreads a model."""


def _accept_clip(_parameters: list[torch.Tensor], _args: Any, _keywords: Any) -> None:
    """Accept whatever clips gradients."""


class Guards:
    """Who is asked before a model is spread, and before gradients are clipped. Main thread."""

    def __init__(self) -> None:
        self._ask: Ask = _accept
        self._ask_clip: AskClip = _accept_clip
        self._clipped: Clipped | None = None

    def before_wrapping(self, ask: Ask) -> None:
        """Call `ask` before DDP, FSDP1 or `fully_shard` takes a module.

        It replaces what an earlier call gave. DDP of a composable `replicate` is seen as well, with
        a list of the module's parameters in its place.
        """
        self._ask = ask
        self._guard(DistributedDataParallel, "__init__", "module", "DistributedDataParallel")
        self._guard(FullyShardedDataParallel, "__init__", "module", "FullyShardedDataParallel")
        from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

        self._guard(FSDPState, "init", "modules", "fully_shard")

    def before_clipping(self, ask: AskClip) -> None:
        """Call `ask` before `torch.nn.utils.clip_grad_norm_` clips.

        It replaces what an earlier call gave. Ranks boot before a cell imports the name from
        anywhere.
        """
        self._ask_clip = ask
        home = sys.modules["torch.nn.utils.clip_grad"]
        native = nn.utils.clip_grad_norm_
        if getattr(native, "_nbdist_asks", False):
            return

        @functools.wraps(native)
        def clip_grad_norm_(
            parameters: torch.Tensor | Iterable[torch.Tensor], *args: Any, **keywords: Any
        ) -> torch.Tensor:
            if torch.compiler.is_compiling():
                return native(parameters, *args, **keywords)
            given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            self._ask_clip(given, args, keywords)
            # torch warns of a generator that is empty.
            is_generator = isinstance(parameters, GeneratorType)
            norm = native((p for p in given) if is_generator else given, *args, **keywords)
            if self._clipped is not None:
                self._clipped(given, args[0] if args else keywords["max_norm"], norm)
            return norm

        clip_grad_norm_._nbdist_asks = True  # type: ignore[attr-defined]
        for owner in (nn.utils, home):
            owner.clip_grad_norm_ = clip_grad_norm_  # type: ignore[attr-defined]

    def after_clipping(self, clipped: Clipped | None) -> None:
        """Call `clipped` after `torch.nn.utils.clip_grad_norm_` has clipped; None: nobody."""
        self._clipped = clipped

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Let nobody know of what is clipped within the block."""
        was, self._clipped = self._clipped, None
        try:
            yield
        finally:
            self._clipped = was

    def _guard(self, owner: Any, name: str, parameter: str, by: str) -> None:
        native = getattr(owner, name)
        if getattr(native, "_nbdist_asks", False):
            return

        @functools.wraps(native)
        def guarded(made: Any, *args: Any, **keywords: Any) -> None:
            given = args[0] if args else keywords[parameter]
            # `fully_shard` takes one module or several, and hands on a tuple.
            for module in given if isinstance(given, tuple) else (given,):
                self._ask(by, module)
            native(made, *args, **keywords)

        guarded._nbdist_asks = True  # type: ignore[attr-defined]
        setattr(owner, name, guarded)


Sharded = Callable[[nn.Parameter], None]  # gets the parameter that holds a shard


def around_sharding(look: Callable[[torch.Tensor], Sharded | None]) -> None:
    """Call `look` with each parameter that `fully_shard` is about to cut, on the main thread.

    What it returns is called with the parameter that takes its place.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    native = FSDPParam.__init__
    if getattr(native, "_nbdist_looks", False):
        return

    @functools.wraps(native)
    def __init__(self: Any, param: nn.Parameter, *args: Any, **keywords: Any) -> None:
        then = look(param)
        native(self, param, *args, **keywords)
        if then is not None:
            then(self.sharded_param)

    __init__._nbdist_looks = True  # type: ignore[attr-defined]
    FSDPParam.__init__ = __init__  # type: ignore[method-assign]


here = Guards()
