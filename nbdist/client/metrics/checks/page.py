"""A rule's section of docs/checks.md, which `%dist checks NAME` shows, too."""

from difflib import unified_diff
from typing import Any

from nbdist.client.metrics.checks.cell_checks import CellChecks
from nbdist.client.metrics.checks.rule import Rule
from nbdist.client.metrics.checks.rules import all_rules
from nbdist.client.metrics.checks.settings import require_rules
from nbdist.client.metrics.telemetry import CellInfo

_PLANTED = CellInfo(1, "", (0, 1), 2, "gloo", ("cpu", "cpu"))


def said_of(rule: Rule[Any], *, is_sound: bool = False) -> str:
    """Return what a rule says of its planted mistake, or of the sound twin."""
    checks = CellChecks(_PLANTED, {rule.name: "warn"})
    checks.receive(list(rule.sound if is_sound else rule.planted))
    checks.end()
    return "".join(checks.found)


def section(rule: Rule[Any]) -> str:
    """Return a rule's section, as Markdown."""
    reads = ", ".join(sorted(rule.watcher.kinds))
    return "\n\n".join(
        [
            f"## `{rule.name}` {{ #{rule.name} }}",
            f"{rule.what[0].upper()}{rule.what[1:]}. It says, with the numbers of the cell:",
            f"> {said_of(rule)}",
            "A cell that makes the mistake:",
            f"```python\n%%distributed\n{rule.example.rstrip()}\n```",
            rule.remedy,
            f"```diff\n{_change(rule)}\n```",
            f"It reads the records `{reads}`. Where people met it: "
            + ", ".join(f"[{_short(url)}]({url})" for url in rule.sources)
            + ".",
        ]
    )


def section_of(name: str) -> str:
    """Return the section of a rule by its name; raises UsageError where there is none."""
    require_rules([name])
    return next(section(rule) for rule in all_rules() if rule.name == name)


def _change(rule: Rule[Any]) -> str:
    """Return the lines that mend the example, with one around them."""
    before, after = rule.example.splitlines(), rule.mended.splitlines()
    _, _, *lines = unified_diff(before, after, n=1, lineterm="")
    return "\n".join(line for line in lines if not line.startswith("@@"))


def _short(url: str) -> str:
    """Return an address as people name it: `pytorch/pytorch#1234`."""
    words = url.partition("://")[2].split("/")
    if words[0] == "github.com":
        return f"{words[1]}/{words[2]}#{words[4]}"
    return words[0]
