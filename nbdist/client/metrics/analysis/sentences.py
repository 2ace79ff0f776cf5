"""Word a verdict, with the numbers behind it. Pure."""

from nbdist.client.metrics.analysis.links import SlowLink
from nbdist.client.metrics.analysis.values import Cause
from nbdist.client.metrics.analysis.work import MOST_OF, Slow, bigger_batch
from nbdist.shared.text import name_rate

_NAMES = {
    "data": "its data loading",
    "optimizer": "its optimizer",
    "other": "the rest of its loop (such as logging or evaluation)",
}
_IDLE = "(it sleeps, or waits for something that is not communication)"


def of_work(slow: Slow) -> str:
    """Return what is known of a rank whose own work is slow."""
    who = f"Rank {slow.rank}"
    if slow.cause == "batch":
        what = bigger_batch(slow.parts)
        assert what is not None, "the cause says so"
        mine, theirs = slow.parts[what]
        return f"{who} gets bigger batches: {mine:.0f} {what} per step against {theirs:.0f}."
    slower = f"{who} {_by_how_much(slow.share)}{', on average' if slow.on_average else ''}"
    if slow.cause == "experts":
        (mine, theirs), (tokens, others) = slow.parts["expert_load"], slow.parts["expert_tokens"]
        return (
            f"{slower}: it computes longer, as its experts get {_short(mine)} times an even share "
            f"of the tokens, {_short(theirs)} times on the others ({tokens:,.0f} a step against "
            f"{others:,.0f})."
        )
    mine, theirs = slow.parts[slow.cause]
    if slow.cause == "starved":
        return (
            f"{who} shares its core: it was ready to run and had to wait "
            f"{_ms(mine)} of every {_ms(slow.step_ms)} step, {_ms(theirs)} on the others."
        )
    against = f"{_ms(mine)} per step, {_ms(theirs)} on the others"
    if slow.cause == "idle":
        against = f"{_ms(max(mine, 0.0))} per step, {_ms(max(theirs, 0.0))} on the others"
        return f"{slower}: it does nothing for {against} {_IDLE}."
    if slow.cause not in ("forward", "backward"):
        return f"{slower}: {_NAMES[slow.cause]} takes {against}."
    # Without a loader nothing tells where forward begins.
    is_seen = slow.cause == "backward" or slow.parts["samples"][0] == slow.parts["samples"][0]
    part = slow.cause if is_seen else "forward, with what precedes it in the loop,"
    if within(slow) == "idle":
        return (
            f"{slower}: its {part} takes {against}, and in it the rank is idle for "
            f"{_ms(slow.within('idle'))} longer {_IDLE}."
        )
    return f"{slower}: it computes longer, {part} takes {against}{_why(slow)}."


def within(slow: Slow) -> Cause | None:
    """Return what a rank does in its slow forward or backward instead of computing."""
    if slow.cause not in ("forward", "backward"):
        return None
    mine, theirs = slow.parts[slow.cause]
    if slow.within("idle") >= MOST_OF * (mine - theirs):
        return "idle"
    samples, _ = slow.parts["samples"]
    if samples != samples and _is_of_processor_time(slow):
        return None
    return "starved" if slow.within("starved") >= slow.late_ms / 4 else None


def _by_how_much(share: float) -> str:
    if share < 1:
        return f"is {100 * share:.0f} % slower"
    return f"takes {_short(1 + share)} times as long per step as its peers, without communication"


def of_link(slow: SlowLink) -> str:
    """Return what is known of a slow link.

    Of the others it is known what they carry at least: of what waits for the slow one, some counts
    as busy.
    """
    source, target = slow.link
    name = f"rank {slow.rank}" if slow.rank in slow.link else f"ranks {source} and {target}"
    text = f"The link of {name} is slow: {name_rate(slow.rate)} against at least "
    text += f"{name_rate(slow.others_rate)} on the others"
    if slow.rtt_s > 5 * slow.others_rtt_s and slow.rtt_s > 1e-3:
        text += (
            f", a round trip takes {_ms(slow.rtt_s * 1e3)} against {_ms(slow.others_rtt_s * 1e3)}"
        )
    return f"{text} (from rank {source} to rank {target})."


def _why(slow: Slow) -> str:
    samples, samples_of_others = slow.parts["samples"]
    if samples != samples and _is_of_processor_time(slow):
        return ", as it has more to do or a slower core"
    if within(slow) == "starved":
        return f", and in it the rank waits {_ms(slow.within('starved'))} longer for a core"
    same = ", with as much to do" if samples == samples_of_others else ""
    return f"{same} (a slower or hotter core?)"


def _is_of_processor_time(slow: Slow) -> bool:
    """Return whether the rank computes longer by its processor's clock too."""
    mine, theirs = slow.parts["cpu"]
    return mine - theirs >= MOST_OF * slow.share * theirs


def _ms(ms: float) -> str:
    return f"{_short(ms)} ms"


def _short(number: float) -> str:
    """Return two digits or more: 0.94, 4.0, 38."""
    if number >= 0.995:
        return f"{number:.0f}" if number >= 9.95 else f"{number:.1f}"
    return f"{number:.2g}" if number >= 0.01 else "0"
