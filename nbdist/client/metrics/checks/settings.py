"""What each rule does with what it finds, as people have set it: pure."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from nbdist.client.metrics.checks.rules import all_rules
from nbdist.shared.errors import UsageError

STATES = ("off", "warn", "raise")
_DEFAULT = "warn"

Setting = str | Mapping[str, str]


def states_of(setting: Setting) -> dict[str, str]:
    """Return the state of each rule.

    Args:
        setting: One for all, or some by name; "all" is the others' name.

    Raises:
        UsageError: There is no such state or rule.
    """
    by_name = setting if isinstance(setting, Mapping) else {"all": setting}
    for name, state in by_name.items():
        if state not in STATES:
            of = "" if name == "all" else f" of {name}"
            raise UsageError(f"checks{of} is one of {', '.join(STATES)}, not {state!r}.")
    require_rules(by_name.keys() - {"all"})
    others = by_name.get("all", _DEFAULT)
    return {rule.name: by_name.get(rule.name, others) for rule in all_rules()}


def require_rules(names: Iterable[str]) -> tuple[str, ...]:
    """Return names of rules; raises UsageError where there is no such rule."""
    if isinstance(names, str):
        names = (names,)
    known = [rule.name for rule in all_rules()]
    for name in names:
        if name not in known:
            close = get_close_matches(str(name), known, n=1)
            hint = f"did you mean {close[0]}?" if close else "%dist checks lists them."
            raise UsageError(f"There is no rule {name!r}; {hint}")
    return tuple(names)
