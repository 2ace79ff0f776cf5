"""Virtual devices by the names of real ones: `--virtual "h100, nvlink4, 1000000x slower"`. Pure."""

from nbdist.shared.errors import UsageError
from nbdist.shared.virtual import VirtualMachine
from nbdist.study.accelerators import ACCELERATORS
from nbdist.study.links import LINKS


def with_rates(text: str) -> str:
    """Return what is asked for, with rates in the place of the names of accelerators and links.

    A device has the rate that large bfloat16 matmuls reach on it, float16 where it lacks these; a
    link that of collectives. What is no machine stays as it is, for others to refuse.
    """
    rated = ", ".join(_rate(part.strip()) for part in text.split(","))
    try:
        VirtualMachine.read(rated)
    except UsageError:
        return text
    return rated


def _rate(part: str) -> str:
    word = part.lower()
    if (device := ACCELERATORS.get(word)) is not None:
        most = device.flops.get("bfloat16", device.flops["float16"])
        return f"{device.share * most / 1e12:.4g} TFLOP/s"
    if (link := LINKS.get(word)) is not None:
        return f"{link.bandwidth / 1e9:.4g} GB/s"
    return part
