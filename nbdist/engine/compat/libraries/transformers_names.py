"""How transformers renames the weights of its older folders when it loads them.

Since its version 5 a model's weights may have other names than the folders that hold them: patterns
in a table of its own tell which. Where weights are also joined (the experts of a mixture), names
alone do not help, and theirs stay. Tried with transformers 5.23; older ones rename by themselves.
"""

import sys
from collections.abc import Iterable
from typing import Any

from torch import nn


def renamed(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Return the model's name of each name in a folder; the same where nothing is known of it."""
    same = {name: name for name in names}
    core: Any = sys.modules.get("transformers.core_model_loading")
    utils: Any = sys.modules.get("transformers.modeling_utils")
    if core is None or utils is None or not isinstance(model, utils.PreTrainedModel):
        return same
    try:
        from transformers import conversion_mapping as table

        found: Any = table
        steps = found.get_model_conversion_mapping(model)
        renamings = [step for step in steps if isinstance(step, core.WeightRenaming)]
        return {name: core.rename_source_key(name, renamings, [])[0] for name in same}
    except (ImportError, AttributeError, TypeError):
        return same  # of another version: names that differ are said in words
