"""Which attention a model of transformers can be switched to. Tried with transformers 5.23."""

from torch import nn


def lacks_sdpa(model: nn.Module) -> bool:
    """Return whether transformers says that "sdpa" does nothing, or raises, for this model."""
    return getattr(model, "_supports_sdpa", None) is False
