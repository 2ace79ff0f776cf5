"""The rules on silent mistakes, a module for each, or for a few that are of one kind.

A module of this folder is all that a rule takes: `all_rules` finds it.
"""

import functools
import importlib
import pkgutil
from typing import Any

from nbdist.client.metrics.checks.rule import Rule


@functools.cache
def all_rules() -> tuple[Rule[Any], ...]:
    """Return the rules, by name."""
    names = [f"{__name__}.{one.name}" for one in pkgutil.iter_modules(__path__)]
    found = [one for name in names for one in vars(importlib.import_module(name)).values()]
    rules = {rule.name: rule for rule in found if isinstance(rule, Rule)}
    return tuple(rules[name] for name in sorted(rules))
