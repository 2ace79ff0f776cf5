"""Collectives whose end is known, packed as they travel to the notebook (`nbdist/packed`)."""

from collections.abc import Iterable, Sequence

from nbdist.engine import where
from nbdist.engine.tap.announce import DTYPES
from nbdist.engine.tap.launch import Launch
from nbdist.packed import Calls, Packer, Template

MAX_TEMPLATES = 4096  # a cell; beyond it one stands for all of its kind, group and peer


class Templates:
    """What this cell's collectives have in common, each with its number."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}
        self._new: dict[int, Template] = {}

    def pack(
        self, launches: Sequence[Launch], waits: Iterable[tuple[int, int]], skipped: int
    ) -> Calls:
        """Return the rows of collectives that have ended, and of the times blocked in some."""
        waits = list(waits)
        moments = [launch.start_ns for launch in launches] + [since for since, _ in waits]
        packer = Packer(base_ns=min(moments, default=0))
        for launch in launches:
            moments = [launch.start_ns, launch.begin_ns, launch.end_ns]
            packer.call(self._number(launch), launch.seq, moments)
        for since, until in waits:
            packer.wait(since, until)
        new, self._new = self._new, {}
        return Calls(packer.base_ns, new, packer.calls, packer.waits, skipped)

    def _number(self, launch: Launch) -> int:
        key: object = (
            *(launch.kind, launch.book, launch.bytes, launch.dtype, launch.place, launch.peer),
        )
        number = self._numbers.get(key)
        if number is None:
            template = _template(launch)
            if len(self._numbers) >= MAX_TEMPLATES:
                key = (launch.kind, launch.book, launch.peer)
                template = _other(template)
                number = self._numbers.get(key)
            if number is None:
                number = self._numbers[key] = len(self._numbers)
                self._new[number] = template
        return number


def _template(launch: Launch) -> Template:
    book = launch.book
    return Template(
        *(launch.kind, book.name, book.title, book.ranks, launch.bytes, DTYPES[launch.dtype]),
        _line(launch.place),
        launch.peer,
    )


def _other(template: Template) -> Template:
    kind, group, title, ranks = template.kind, template.group, template.title, template.ranks
    return Template(kind, group, title, ranks, 0, "", "other", template.peer)


def _line(place: where.Place | None) -> str:
    if place is None:
        return ""
    file, line = place
    prompt = where.prompt_of(file)
    return f"cell {prompt}, line {line}" if prompt else f"line {line}"
