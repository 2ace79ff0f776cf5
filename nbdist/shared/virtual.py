"""The device and link that each rank of a virtual cluster stands for: `%dist start --virtual`."""

import re
from dataclasses import dataclass

from nbdist.shared.errors import UsageError
from nbdist.shared.text import figure

_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_NUMBER = r"(\d+(?:\.\d+)?(?:e\+?\d+)?)"
_DEVICE = re.compile(rf"{_NUMBER} ?([kMGTP]?)FLOP/?s", re.IGNORECASE)
_BITS = re.compile(rf"{_NUMBER} ?([kMGTP]?)bit/s", re.IGNORECASE)
_BYTES = re.compile(rf"{_NUMBER} ?([kMGT]?)B/s", re.IGNORECASE)
_SLOWED = re.compile(rf"{_NUMBER} ?x slower", re.IGNORECASE)
_LINK = re.compile(rf"(?P<rate>.+?)(?: {_NUMBER} ?(?P<unit>us|ms|s))?", re.IGNORECASE)
_IN_A_SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6}


@dataclass(frozen=True, slots=True)
class VirtualMachine:
    """What one rank stands for.

    Attributes:
        flops_per_s: Floating-point operations a second of its device: those that a training
            reaches, which are fewer than a data sheet's.
        bytes_per_s: What it sends to one peer at a time.
        slowed: How many times slower all of it runs here.
        latency_s: Of each message of a collective that waits for another one, beside what this
            machine takes for it; 0 where none is emulated.
    """

    flops_per_s: float
    bytes_per_s: float
    slowed: float = 1.0
    latency_s: float = 0.0

    @classmethod
    def read(cls, text: object) -> "VirtualMachine":
        """Return the machine that is written so: "2 GFLOP/s, 100 Mbit/s 5 ms".

        The link may be in bytes, "12 MB/s", and without a latency. A third part slows all of it,
        for devices that are too fast for this machine: "400 TFLOP/s, 50 GB/s, 10000x slower".

        Raises:
            UsageError: It is not.
        """
        parts = [part.strip() for part in str(text).split(",")]
        slowed = 1.0
        if len(parts) == 3:
            slowed = _number(_SLOWED.fullmatch(parts.pop()))
        if len(parts) != 2 or not 1 <= slowed < float("inf"):
            raise _refusal(text)
        rate_text, latency_s = with_latency(parts[1])
        bits, whole = _BITS.fullmatch(rate_text), _BYTES.fullmatch(rate_text)
        rate = _number(bits) / 8 if bits else _number(whole)
        machine = cls(_number(_DEVICE.fullmatch(parts[0])), rate, slowed, latency_s or 0.0)
        if not min(machine.flops_here, machine.bytes_here) >= 1:
            raise _refusal(text)
        return machine

    @property
    def flops_here(self) -> float:
        """Floating-point operations a second as they run here."""
        return self.flops_per_s / self.slowed

    @property
    def bytes_here(self) -> float:
        """Bytes a second as they are sent here."""
        return self.bytes_per_s / self.slowed

    @property
    def latency_here(self) -> float:
        """Seconds of a message's latency here."""
        return self.latency_s * self.slowed

    def __str__(self) -> str:
        """Return it as `read` takes it: "2 GFLOP/s, 100 Mbit/s"."""
        text = f"{_rate(self.flops_per_s)}FLOP/s, {_rate(8 * self.bytes_per_s)}bit/s"
        text += f" {name_latency(self.latency_s)}" if self.latency_s else ""
        return text if self.slowed == 1 else f"{text}, {self.slowed:.12g}x slower"

    def told(self) -> str:
        """Return it for people: with what is emulated here, where that is another one."""
        here = VirtualMachine(self.flops_here, self.bytes_here, latency_s=self.latency_here)
        return str(self) if self.slowed == 1 else f"{self} (here {here})"


def with_latency(link: str) -> tuple[str, float | None]:
    """Return a link's rate, or name, and the seconds of latency behind it: "100 Mbit/s 5 ms"."""
    found = _LINK.fullmatch(link)
    if found is None or found["unit"] is None:
        return link, None
    return found["rate"], float(found[2]) / _IN_A_SECOND[found["unit"].lower()]


def name_latency(seconds: float) -> str:
    """Return a latency as people write it: "5 ms", "3 us", "30 s"."""
    unit = "s" if seconds >= 1 else "ms" if seconds >= 1e-3 else "us"
    return f"{seconds * _IN_A_SECOND[unit]:.6g} {unit}"


def _number(found: re.Match[str] | None) -> float:
    """Return the number of a part in its unit; 0, which is no rate, where it is none."""
    if found is None:
        return 0.0
    number, *prefix = found.groups()
    known = {key.lower(): worth for key, worth in _PREFIXES.items()}
    return float(number) * known["".join(prefix).lower()]


def _rate(value: float) -> str:
    prefix = max((p for p, worth in _PREFIXES.items() if worth <= value), key=_PREFIXES.__getitem__)
    scaled = value / _PREFIXES[prefix]
    return f"{int(scaled) if scaled == int(scaled) else figure(scaled)} {prefix}"


def _refusal(text: object) -> UsageError:
    return UsageError(
        f"virtual is the rate of a device and of its links, not {text!r}.",
        why="a part is missing, unknown or too small",
        do='--virtual "2 GFLOP/s, 100 Mbit/s 5 ms"   or   "400 TFLOP/s, 50 GB/s, 100000x slower"',
    )
