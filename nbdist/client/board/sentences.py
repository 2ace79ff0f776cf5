"""One or a few sentences for each view: spoken by screen readers, written above a plain table.

They hold the numbers of now, so they are never part of what nbval compares.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from nbdist.amounts import counted
from nbdist.client.board.text import count, figure, size
from nbdist.client.metrics.analysis.values import RECENT
from nbdist.ranks import name_ranks

if TYPE_CHECKING:  # for its type alone: the scene loads numpy
    from nbdist.client.board.scene import Scene, Stack

NOT_EXPLAINED = "What ranks wait for is not known yet: their collectives have not been compared."
NOT_TIMED = (
    "Communication was not measured, so nobody knows who waits for whom: %config NBDist.tap is not "
    "'full'."
)


def sentence(name: str, scene: "Scene") -> str:
    """Return what the view called `name`, one of `board.VIEWS`, shows."""
    return _SENTENCES[name](scene)


def verdicts(scene: "Scene") -> list[str]:
    """Return the verdicts; where there is none, that none is, or why none can be."""
    if scene.analysis.verdicts:
        return [verdict.sentence for verdict in scene.analysis.verdicts]
    if scene.last_step == 0:
        return ["No step has been made yet."]
    if len(scene.rows) == 1:
        return ["One rank alone has nobody to be compared with."]
    if scene.first_step < RECENT:
        furthest = min(scene.reporting, key=lambda row: row.step)
        made = counted(furthest.step, "step")
        return [
            f"Too early to tell: it takes {RECENT} steps, and rank {furthest.rank} made {made}."
        ]
    if not scene.is_timed:
        return [NOT_TIMED]
    if not scene.analysis.ranks:
        return [NOT_EXPLAINED]
    return [f"No rank stands out over the last {RECENT} steps."]


def no_collectives(scene: "Scene") -> str:
    """Return why there are no collectives to be seen."""
    if len(scene.rows) == 1:
        return "One rank alone has nobody to communicate with."
    if not scene.is_timed:
        return "Collectives were not timed: %config NBDist.tap is not 'full'."
    return "No collective has been compared yet."


def _overview(scene: "Scene") -> str:
    of = f" of {scene.total:,}" if scene.total else ""
    parts = [f"Step {scene.first_step:,}{of}" if scene.last_step else "Logging"]
    losses = [row.loss for row in scene.rows if row.loss is not None]
    if losses:
        bad = [row.rank for row in scene.rows if row.loss is not None and _is_odd(row.loss)]
        mean = sum(losses) / len(losses)
        parts.append(f"loss not finite on {name_ranks(bad)}" if bad else f"loss {figure(mean)}")
    if scene.comm_pct is not None:
        parts.append(f"{scene.comm_pct:.0f} % of a step in communication")
    elif not scene.is_timed:
        parts.append("communication not measured")
    if scene.slow:
        verb = "makes" if len(scene.slow) == 1 else "make"
        whom = "each other" if scene.slow >= set(scene.ranks) else "the others"
        parts.append(f"{name_ranks(scene.slow)} {verb} {whom} wait")
    return ", ".join(parts) + "."


def _loss(scene: "Scene") -> str:
    losses = {row.rank: row.loss for row in scene.rows if row.loss is not None}
    if not losses:
        return "No loss has been seen yet."
    bad = [rank for rank, loss in losses.items() if _is_odd(loss)]
    if bad:
        return f"Step {scene.first_step:,}: the loss of {name_ranks(bad)} is not finite."
    high, low = max(losses, key=losses.__getitem__), min(losses, key=losses.__getitem__)
    text = f"Step {scene.first_step:,}: loss {figure(sum(losses.values()) / len(losses))}"
    least, most = figure(losses[low]), figure(losses[high])
    if least != most:
        text += f", from {least} on rank {low} to {most} on rank {high}"
    return text + "."


def _step(scene: "Scene") -> str:
    stack = scene.stack
    if stack is None:
        return "No step has been made yet."
    whole = float(stack.whole_ms.mean())
    if not whole:
        return "A step took no time that was measured."
    shares = {name: 100 * float(part.mean()) / whole for name, part in stack.parts.items()}
    told = [f"{share:.0f} % {name}" for name, share in shares.items() if share >= 0.5]
    text = f"A step takes {figure(whole)} ms: {', '.join(told)}."
    return f"{text} {NOT_TIMED}" if not scene.is_timed else f"{text}{_longest_wait(stack)}"


def _longest_wait(stack: "Stack") -> str:
    if not stack.waits_for:
        return ""
    waiter = max(stack.waits_for, key=lambda rank: stack.waits_for[rank][1])
    awaited, time_ms = stack.waits_for[waiter]
    return f" Rank {waiter} waits longest: {figure(time_ms)} ms a step for rank {awaited}."


def _collectives(scene: "Scene") -> str:
    table = scene.analysis.table
    if not table:
        return no_collectives(scene)
    each_step = count(sum(row.count for row in table))
    text = "1 collective a step" if each_step == "1" else f"{each_step} collectives a step"
    text += f", of {len(table):,} sorts" if len(table) > 1 else ""
    longest = max(table, key=lambda row: row.count * (row.waiting_ms or row.transfer_ms or 0.0))
    text += f"; most is waited in {longest.kind}"
    text += f" of {size(longest.bytes)}" if longest.bytes else ""
    if longest.waiting_ms is not None:
        text += f", {figure(longest.waiting_ms)} ms each time"
    if longest.last is not None:
        text += f", where rank {longest.last[0]} most often comes last"
    text += "."
    if scene.analysis.clock_error_ms:
        text += (
            f" Clocks of two ranks differ by at most {figure(scene.analysis.clock_error_ms)} ms."
        )
    if scene.analysis.left_out:
        untold = counted(scene.analysis.left_out, "collective")
        have = "has" if scene.analysis.left_out == 1 else "have"
        text += f" Some steps were left out to keep the cost low: {untold} {have} no times."
    return text


def _ranks(scene: "Scene") -> str:
    if not scene.reporting:
        return "No rank has said anything yet."
    text = f"{counted(len(scene.reporting), 'rank')} at step {scene.first_step:,}"
    if scene.last_step > scene.first_step:
        text += f" to {scene.last_step:,}"
    if scene.steps_per_s:
        text += f", {figure(scene.steps_per_s)} steps/s"
    memory = {row.rank: row.memory_bytes for row in scene.rows if row.memory_bytes}
    if memory:
        most = max(memory, key=memory.__getitem__)
        text += f"; most memory: {size(memory[most])} on rank {most}"
    quiet = [row.rank for row in scene.rows if row not in scene.reporting]
    return text + (f"; {name_ranks(quiet)} silent." if quiet else ".")


def _verdicts(scene: "Scene") -> str:
    return " ".join(verdicts(scene))


_SENTENCES: dict[str, "Callable[[Scene], str]"] = {
    "overview": _overview,
    "loss": _loss,
    "step": _step,
    "collectives": _collectives,
    "ranks": _ranks,
    "verdicts": _verdicts,
}


def _is_odd(value: float) -> bool:
    return value - value != 0.0  # nan and infinities
