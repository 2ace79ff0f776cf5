"""The packed form in which one step's collectives travel from a rank to the notebook.

A step of FSDP or tensor parallelism has hundreds of collectives, the same in each step. What
they have in common, a `Template`, travels once a cell; a row of numbers follows for each:

- `CALL` columns: the template's number, the collective's number in its group (of a message: to or
  from that peer with that tag), and its moments *launch* (the rank called it), *begin* (it was
  carried out; what lies between is queueing), *end* and *freed* (the parameters that it gathered
  were; 0: they were not, or it gathers none);
- `WAIT` columns: from when to when the main thread was blocked in collectives.

Moments count in ticks of `TICK_NS` from the record's `base_ns`, which the rank's own monotonic
clock (`time.perf_counter_ns`) tells; 429 s fit, what lies further is clamped.
"""

import sys
from array import array
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, field
from typing import Any

TICK_NS = 100
CALL = ("template", "number", "launch", "begin", "end", "freed")
WAIT = ("from", "to")
ANY_TAG = -1
_LONGEST = 2**32 - 1


@dataclass(frozen=True, slots=True)
class Template:
    """What similar collectives of one rank have in common.

    `group` is the group's name in torch, `title` in words ("group dp"); `ranks` are its global
    ranks in its order, empty where torch does not know them. `bytes` is what this rank puts in, or
    takes out in a recv. `line` is where the cell called it, "cell 7, line 3", empty when unknown.
    `peer` is the other global rank of a send or recv, None else and for any source; `tag` that of
    the message, `ANY_TAG` where its number counts messages of all tags. `unit` names the parameters
    of FSDP2 that it carries.
    """

    kind: str
    group: str
    title: str
    ranks: tuple[int, ...]
    bytes: int
    dtype: str
    line: str
    peer: int | None = None
    tag: int = 0
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Calls:
    """The collectives of one step of one rank.

    `new` are templates that this rank has not told before in this cell, by number. `calls` and
    `waits` hold rows of `CALL` and `WAIT`, one behind the other. `skipped` counts collectives since
    the last such record whose times are not known: the step was left out, or an end was not seen.
    `end_ns` is when the step was over, by the clock of `base_ns`.
    """

    base_ns: int
    new: Mapping[int, Template]
    calls: "array[int]"
    waits: "array[int]"
    skipped: int = 0
    end_ns: int = 0

    def to_wire(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            "base": self.base_ns,
            "new": {str(number): astuple(template) for number, template in self.new.items()},
            "calls": text_of(self.calls),
            "waits": text_of(self.waits),
            "skipped": self.skipped,
            "end": self.end_ns,
        }

    @classmethod
    def from_wire(cls, content: dict[str, Any]) -> "Calls":
        """Return what `to_wire` wrote."""
        new = {
            int(number): Template(kind, group, title, tuple(ranks), *rest)
            for number, (kind, group, title, ranks, *rest) in content["new"].items()
        }
        calls, waits = numbers_of(content["calls"]), numbers_of(content["waits"])
        return cls(content["base"], new, calls, waits, content["skipped"], content["end"])


@dataclass(slots=True)
class Packer:
    """Collects the rows of one step.

    Attributes:
        base_ns: What moments count from.
    """

    base_ns: int
    calls: "array[int]" = field(default_factory=lambda: array("I"))
    waits: "array[int]" = field(default_factory=lambda: array("I"))

    def call(
        self, template: int, number: int, moments_ns: Iterable[int], freed_ns: int = 0
    ) -> None:
        """Add a collective; its moments are launch, begin and end."""
        moments = map(self._ticks, (*moments_ns, freed_ns))
        self.calls.extend((template, number & _LONGEST, *moments))

    def wait(self, from_ns: int, to_ns: int) -> None:
        """Add a time during which the main thread was blocked."""
        self.waits.extend((self._ticks(from_ns), self._ticks(to_ns)))

    def _ticks(self, moment_ns: int) -> int:
        return min(max(0, (moment_ns - self.base_ns) // TICK_NS), _LONGEST)


def text_of(numbers: "array[Any]") -> str:
    """Return numbers as text, little-endian on any machine; exact."""
    if sys.byteorder == "big":
        numbers = array(numbers.typecode, numbers)
        numbers.byteswap()
    return b64encode(numbers.tobytes()).decode("ascii")


def numbers_of(text: str, typecode: str = "I") -> "array[Any]":
    """Return what `text_of` wrote of an array of this type."""
    numbers = array(typecode, b64decode(text))
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
