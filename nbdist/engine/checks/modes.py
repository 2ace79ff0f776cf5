"""Tell which modules of a model are in evaluation mode, of those that act by their mode.

Main thread.
"""

from hashlib import blake2b
from types import CodeType
from weakref import ref

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

_RATES = ("p", "dropout")  # of dropout: at 0 a module does the same in both modes


class Modes:
    """A model's modules that act by their mode, as it had them when this was made.

    Looked for once, for in a large model that takes as long as some steps do.
    """

    def __init__(self, model: nn.Module) -> None:
        named = list(model.named_modules())
        asking = {kind for kind in {type(module) for _, module in named} if _reads_mode(kind)}
        modal = [(n, m) for n, m in named if type(m) in asking and not _is_idle(m)]
        names = blake2b("\n".join(name for name, _ in modal).encode(), digest_size=6)
        self._names = float(int.from_bytes(names.digest()))
        self._modules = [ref(module) for _, module in modal]

    def now(self) -> dict[str, float]:
        """Return how many there are, which, and how many of them evaluate.

        Ranks that hold the same ones have one `modal_names`: those of a pipeline do not.
        """
        alive = [module for held in self._modules if (module := held()) is not None]
        return {
            "modal": float(len(alive)),
            "modal_names": self._names,
            "in_eval": float(sum(not module.training for module in alive)),
        }

    def drops(self) -> bool:
        """Return whether any of them is dropout of torch's that drops."""
        alive = (held() for held in self._modules)
        return any(isinstance(m, _DropoutNd) and m.training and m.p for m in alive)


def _is_idle(module: nn.Module) -> bool:
    rates = (vars(module).get(name) for name in _RATES)
    return any(rate == 0 for rate in rates if isinstance(rate, int | float))


def _reads_mode(kind: type[nn.Module]) -> bool:
    """Return whether a class has a method of its own that reads `training`."""
    bases = kind.__mro__[: kind.__mro__.index(nn.Module)]
    codes = (getattr(held, "__code__", None) for base in bases for held in vars(base).values())
    return any("training" in code.co_names for code in codes if isinstance(code, CodeType))
