"""Word a verdict, with the numbers behind it. Pure."""

from nbdist.client.insight.links import SlowLink
from nbdist.client.insight.work import MOST_OF, Slow, bigger_batch

_NAMES = {
    "data": "its data loading",
    "optimizer": "its optimizer",
    "other": "the rest of its loop (such as logging or evaluation)",
    "idle": "it did nothing (it slept, or waited for something that is no communication): that",
}


def of_work(slow: Slow) -> str:
    """Return what is known of a rank whose own work is slow."""
    who = f"rank {slow.rank}"
    if slow.cause == "batch":
        what = bigger_batch(slow.parts)
        assert what is not None, "the cause says so"
        mine, theirs = slow.parts[what]
        return f"{who} gets bigger batches: {mine:.0f} {what} a step against {theirs:.0f}."
    mine, theirs = slow.parts[slow.cause]
    if slow.cause == "starved":
        return (
            f"{who} shares its core: it was ready to run and had to wait "
            f"{_ms(mine)} of every {_ms(slow.step_ms)} step, {_ms(theirs)} on the others."
        )
    slower = f"{who} is {slow.share:.0%} slower".replace("%", " %")
    if slow.cause in ("forward", "backward"):
        idle, idle_of_others = slow.parts["idle"]
        if idle - idle_of_others >= MOST_OF * slow.late_ms:
            return (
                f"{slower}: its {slow.cause} takes {_ms(mine)} a step, {_ms(theirs)} on the others,"
                f" and {_ms(idle - idle_of_others)} of it nothing ran (it slept, or waited for "
                "something that is no communication)."
            )
        return (
            f"{who} computes slower than its peers: {_ms(mine)} of {slow.cause} a step against "
            f"{_ms(theirs)}{_as_much(slow)}."
        )
    return f"{slower}: {_NAMES[slow.cause]} takes {_ms(mine)} a step, {_ms(theirs)} on the others."


def of_link(slow: SlowLink) -> str:
    """Return what is known of a slow link."""
    source, target = slow.link
    name = f"rank {slow.rank}" if slow.rank in slow.link else f"ranks {source} and {target}"
    text = f"the link of {name} is slow: {_rate(slow.rate)} against {_rate(slow.others_rate)}"
    if slow.rtt_s > 5 * slow.others_rtt_s and slow.rtt_s > 1e-3:
        text += (
            f", a round trip takes {_ms(slow.rtt_s * 1e3)} against {_ms(slow.others_rtt_s * 1e3)}"
        )
    return f"{text} (from rank {source} to rank {target})."


def _as_much(slow: Slow) -> str:
    mine, theirs = slow.parts["samples"]
    same = ", with as much to do" if mine == theirs else ""
    return f"{same} (a slower or hotter core?)"


def _rate(rate: float) -> str:
    return f"{_short(rate / 1e9)} GB/s" if rate >= 0.5e9 else f"{_short(rate / 1e6)} MB/s"


def _ms(ms: float) -> str:
    return f"{_short(ms)} ms"


def _short(number: float) -> str:
    """Return two digits or more: 0.94, 4.1, 38."""
    return f"{number:.0f}" if number >= 9.95 else f"{number:.2g}" if number >= 0.01 else "0"
