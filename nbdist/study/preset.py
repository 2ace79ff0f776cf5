"""What a machine that nobody has yet would do, by presets: `%dist probe --on`. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from nbdist.shared.text import aligned, figure, milliseconds, name_bytes
from nbdist.study.links import Link
from nbdist.study.machine import Machine

_SIZES: Final = (1_000_000, 25_000_000, 1_000_000_000)  # of an all_reduce


@dataclass(frozen=True, slots=True)
class PresetProbe:
    """A machine's links and computing, from presets. Prints as a table, with its sources.

    Attributes:
        machine: As it was named.
        here: Floating-point operations a second by dtype of a rank here, measured; empty where no
            ranks run.
    """

    machine: Machine
    here: Mapping[str, float]

    def all_reduce_s(self, nbytes: int, ranks: Sequence[int]) -> float:
        """Return the seconds of an all_reduce of these ranks."""
        link = self.machine.link_of(ranks)
        return link.collective_s("all_reduce", nbytes, len(ranks))

    def flops(self, dtype: str) -> float:
        """Return the operations a second that large matmuls reach; 0 of a dtype it has not."""
        accelerator = self.machine.accelerator
        return accelerator.share * accelerator.flops.get(dtype, 0.0)

    def __str__(self) -> str:
        """Return what all_reduces take, how fast it computes, and what that rests on."""
        machine = self.machine
        memory = name_bytes(machine.accelerator.memory_bytes)
        lines = [f"{machine}: {memory} each. From presets: nothing of it was measured."]
        groups = self._groups()
        if groups:
            rows = [("all_reduce", *groups)]
            for size in _SIZES:
                times = (self.all_reduce_s(size, ranks) for ranks in groups.values())
                rows.append((name_bytes(size), *(f"{milliseconds(1e3 * s)} ms" for s in times)))
            lines += aligned(rows, (True,) * len(rows[0]))
        lines += self._computing()
        if groups:
            lines.append(_BAND)
        return "\n".join([*lines, "Sources:", *self._sources()])

    __repr__ = __str__

    def _groups(self) -> dict[str, Sequence[int]]:
        machine = self.machine
        found: dict[str, Sequence[int]] = {}
        if machine.per_host > 1:
            found[f"{machine.per_host} ranks of a host"] = range(machine.per_host)
        if machine.hosts > 1:
            found[f"all {machine.world_size} ranks"] = range(machine.world_size)
        if machine.hosts > 1 and machine.per_host > 1:
            found["one rank of each host"] = range(0, machine.world_size, machine.per_host)
        return found

    def _computing(self) -> list[str]:
        accelerator = self.machine.accelerator
        rows = [["computing", "data sheet", "large matmuls"]]
        if self.here:
            rows[0] += ["a rank here", "times as fast"]
        for dtype, peak in accelerator.flops.items():
            if dtype == "tf32" and peak == accelerator.flops["float32"]:
                continue
            there, here = self.flops(dtype), self.here.get(dtype)
            row = [dtype, name_flops(peak), name_flops(there)]
            if self.here:
                row += [name_flops(here), figure(there / here)] if here else ["", ""]
            rows.append(row)
        share = f"{100 * accelerator.share:.0f} % of the data sheet"
        said = f"Large matmuls reach {share}, as others measured in bfloat16."
        if accelerator.is_assumed:
            said = f"Large matmuls are assumed to reach {share}."
        if self.here:
            said += " A step that computing alone limits would be about so many times as fast."
        else:
            said += " %dist start, and it is compared with the ranks here."
        return [*aligned(rows, [False, *[True] * (len(rows[0]) - 1)]), said]

    def _sources(self) -> list[str]:
        accelerator, between = self.machine.accelerator, self.machine.between
        used: list[Link] = []
        if self.machine.per_host > 1:
            used.append(self.machine.inside)
        if between is not None:
            used.append(between)
        lines = [f"  {accelerator.name}: {accelerator.source}."]
        lines += [f"  {link.name}: {link.source}." for link in used]
        return lines


# See LINKS for the figures, and whose they are.
_BAND: Final = (
    "Compared with all_reduces that others measured: on 8 H200 they took 0.8 to 1.4 times what is "
    "predicted; on 32 B200 of 4 hosts 1 to 1.4 times, and between 131 kB and 134 MB up to 2.7 "
    "times. Other machines were not compared. Groups between hosts are taken to send all at once."
)


def name_flops(rate: float) -> str:
    """Return operations a second as data sheets do: 989 TFLOP/s, 34.1 GFLOP/s."""
    unit, worth = ("TFLOP/s", 1e12) if rate >= 1e12 else ("GFLOP/s", 1e9)
    return f"{figure(rate / worth)} {unit}"


def median_rates(rates: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
    """Return the median of the ranks, by dtype."""
    dtypes = next(iter(rates.values()), {})
    return {dtype: median(of_rank[dtype] for of_rank in rates.values()) for dtype in dtypes}
