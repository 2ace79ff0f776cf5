"""A rule on gradients that a step has used, and that nothing zeroes before the next."""

from nbdist.client.metrics.checks.planting import DDP, both, training
from nbdist.client.metrics.checks.rule import Rule
from nbdist.client.metrics.checks.uses import Seen, Uses, where_told
from nbdist.shared.text import name_ranks


@where_told("unzeroed")
def _keeps_old_gradients(seen: Seen) -> str:
    kept = [
        {
            rank
            for rank, is_kept in step.of("unzeroed").items()
            # Of several optimizers each may gather gradients over other steps.
            if is_kept and step.by_rank[rank].get("optimizers", 1.0) == 1
        }
        for step in seen.steps
    ]
    if len(kept) < 2 or not all(kept[-2:]):
        return ""
    return (
        "The optimizer steps with the gradients of all earlier steps, too: those that a step has "
        f"used were not zeroed before step {seen.steps[-2].number:,} and step "
        f"{seen.last.number:,} on {name_ranks(sorted(kept[-1]))}, and the new ones were added to "
        "them. Call optimizer.zero_grad() after each optimizer.step(); also where several "
        "backwards make one step."
    )


_FORGOTTEN = "    optimizer.zero_grad()\n"
_MENDED = training(DDP)

FORGOTTEN_ZERO_GRAD = Rule(
    "forgotten-zero-grad",
    "gradients that a step has used are in the next step, too",
    Uses,
    _keeps_old_gradients,
    remedy="Call optimizer.zero_grad() after each optimizer.step(), or before the next backward.",
    planted=both("use", (2, 5), unzeroed=1),
    sound=both("use", (2, 5), unzeroed=0),
    example=_MENDED.replace(_FORGOTTEN, ""),
    mended=_MENDED,
    sources=(
        "https://github.com/pytorch/pytorch/issues/47175",
        "https://github.com/meta-pytorch/torchforge/pull/71",
        "https://github.com/tenstorrent/tt-blacksmith/pull/711",
    ),
)
