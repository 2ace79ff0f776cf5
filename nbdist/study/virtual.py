"""Virtual devices by the names of real ones: `--virtual "h100, nvlink4, 1000000x slower"`. Pure."""

from nbdist.shared.errors import UsageError
from nbdist.shared.virtual import VirtualMachine, name_latency, with_latency
from nbdist.study.accelerators import ACCELERATORS
from nbdist.study.links import LINKS
from nbdist.study.machine import require_link


def with_rates(text: str) -> str:
    """Return what is asked for, with rates in the place of the names of accelerators and links.

    A device has the rate that large bfloat16 matmuls reach on it, float16 where it lacks these; a
    link that of collectives and, unless one is written, their latency. What is no machine stays as
    it is, for others to refuse.

    Raises:
        UsageError: The link does not join such accelerators, or there are hosts.
    """
    parts = [part.strip() for part in text.split(",")]
    if any({"host", "hosts"} & set(part.lower().split()) for part in parts):
        raise UsageError(
            f"virtual: {text!r} has several hosts, and all virtual links are alike.",
            why="the ranks of both ends are not known of each connection, to pace some otherwise",
            do='--virtual "h100, ib400": what joins all of them waits for the slowest link',
        )
    if parts[1:] and (device := ACCELERATORS.get(parts[0].lower())) is not None:
        require_link(device, with_latency(parts[1].lower())[0], text)
    rated = ", ".join(_rate(part) for part in parts)
    try:
        VirtualMachine.read(rated)
    except UsageError:
        return text
    return rated


def _rate(part: str) -> str:
    if (device := ACCELERATORS.get(part.lower())) is not None:
        most = device.flops.get("bfloat16", device.flops["float16"])
        return f"{device.share * most / 1e12:.4g} TFLOP/s"
    word, latency_s = with_latency(part)
    if (link := LINKS.get(word.lower())) is not None:
        seconds = link.latency_s if latency_s is None else latency_s
        return f"{link.bandwidth / 1e9:.4g} GB/s {name_latency(seconds)}"
    return part
