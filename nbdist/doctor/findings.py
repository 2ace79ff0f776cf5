"""What the doctor says: findings, and the report they make."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `fix` is empty when nothing is to be done."""

    name: str
    says: str
    is_wrong: bool = False
    fix: str = ""


def render(findings: Sequence[Finding]) -> str:
    """Return the report as text: a line each, fixes beneath, and a last line that sums it up."""
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        sign = "!!" if finding.is_wrong else "ok"
        lines.append(f"{sign}  {finding.name:<{width}}  {finding.says}")
        if finding.fix:
            lines.append(f"    {'':<{width}}  Do: {finding.fix}")
    wrong = sum(finding.is_wrong for finding in findings)
    if wrong:
        lines.append(f"{wrong} problem{'s' * (wrong > 1)} found.")
    else:
        lines.append("Nothing is wrong.")
    return "\n".join(lines)
