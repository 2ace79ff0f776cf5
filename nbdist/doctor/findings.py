"""What the doctor says: findings, and the report they make."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `mend` is empty when nothing is to be done."""

    name: str
    says: str
    is_wrong: bool = False
    mend: str = ""


def render(findings: Sequence[Finding]) -> str:
    """Return the report as text: a line each, mends beneath, and a last line that sums it up."""
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        sign = "!!" if finding.is_wrong else "ok"
        lines.append(f"{sign}  {finding.name:<{width}}  {finding.says}")
        if finding.mend:
            lines.append(f"    {'':<{width}}  Do: {finding.mend}")
    wrong = sum(finding.is_wrong for finding in findings)
    if wrong:
        lines.append(f"{wrong} thing{'s' * (wrong > 1)} to mend.")
    else:
        lines.append("Nothing is wrong.")
    return "\n".join(lines)
