"""Collectives whose end is known, packed as they are sent (`nbdist/shared/packed`)."""

from collections.abc import Iterable, Sequence

from nbdist.engine.kernel import location
from nbdist.engine.tap.collective import LaunchedCollective
from nbdist.engine.tap.collective_check import DTYPES
from nbdist.shared.packed import ANY_TAG, Calls, Packer, Template

MAX_TEMPLATES = 4096  # a cell; beyond it one is shared by all of its kind, group and peer


class Templates:
    """The numbered templates of this cell: what many of its collectives have in common."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}
        self._new: dict[int, Template] = {}

    def pack(
        self,
        launches: Sequence[LaunchedCollective],
        waits: Iterable[tuple[int, int]],
        skipped: int,
        end_ns: int,
    ) -> Calls:
        """Return the rows of collectives that have ended, and of the times blocked in some.

        Their step was over at `end_ns`.
        """
        waits = list(waits)
        moments = [launch.start_ns for launch in launches] + [since for since, _ in waits]
        packer = Packer(base_ns=min(moments, default=0))
        for launch in launches:
            moments = [launch.start_ns, launch.begin_ns, launch.end_ns]
            packer.call(*self._numbers_of(launch), moments, launch.freed_ns)
        for since, until in waits:
            packer.wait(since, until)
        new, self._new = self._new, {}
        return Calls(packer.base_ns, new, packer.calls, packer.waits, skipped, end_ns)

    def _numbers_of(self, launch: LaunchedCollective) -> tuple[int, int]:
        """Return the template's number, and the call's number among those that match on peers."""
        key: object = (
            *(launch.kind, launch.book, launch.bytes, launch.dtype, launch.place, launch.peer),
            *(launch.tag, launch.unit),
        )
        at = self._numbers.get(key)
        if at is not None:
            return at, launch.tag_number
        template, number = _template(launch), launch.tag_number
        if len(self._numbers) >= MAX_TEMPLATES:
            key = (launch.kind, launch.book, launch.peer)
            template, number = _other(template), launch.seq
            at = self._numbers.get(key)
        if at is None:
            at = self._numbers[key] = len(self._numbers)
            self._new[at] = template
        return at, number


def _template(launch: LaunchedCollective) -> Template:
    book = launch.book
    return Template(
        *(launch.kind, book.name, book.title, book.ranks, launch.bytes, DTYPES[launch.dtype]),
        _line(launch.place),
        *(launch.peer, launch.tag, launch.unit),
    )


def _other(template: Template) -> Template:
    kind, group, title, ranks = template.kind, template.group, template.title, template.ranks
    tag = ANY_TAG if kind in ("send", "recv") else 0
    return Template(kind, group, title, ranks, 0, "", "other", template.peer, tag)


def _line(place: location.Place | None) -> str:
    if place is None:
        return ""
    file, line = place
    return location.here.describe_line(location.here.prompt_of(file), line)
