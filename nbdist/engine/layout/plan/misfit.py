"""A layout's text that does not fit, and what to write instead: only what fits. Pure.

Advice is tried before it is given. Each layout in it, in double quotes, must parse as a
mesh of the same ranks.
"""

import difflib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from nbdist.engine.layout.plan.axis_facts import FACTS
from nbdist.shared.errors import LayoutError

_QUOTED = re.compile(r'"([^"]*)"')


class Misfit(Exception):
    """Why a text is no layout of these ranks.

    Args:
        what: One sentence, what is wrong.
        why: The cause, where `what` does not say it.
        tries: Pieces of advice, the best first.
        do: The advice if none of them fits.
    """

    def __init__(
        self, what: str, *, why: str = "", tries: Iterable[str] = (), do: str = ""
    ) -> None:
        super().__init__(what)
        self._what, self._why, self._tries, self._do = what, why, tuple(tries), do

    def error(self, fits: Callable[[str], bool]) -> LayoutError:
        """Return the error that people read; `fits` says whether a layout does."""
        good = (advice for advice in self._tries if all(map(fits, _QUOTED.findall(advice))))
        return LayoutError(self._what, why=self._why, do=next(good, self._do))


def unknown(word: str, words: Sequence[str], known: Sequence[str]) -> Misfit:
    """Return the misfit of an unknown word in a layout."""
    # Letters change places, or one is another: dpp is meant as ddp, though pp is nearer to it.
    as_long = [name for name in known if len(name) == len(word)]
    near = difflib.get_close_matches(word, as_long, n=1, cutoff=0.5)
    near = near or difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    correct = re.compile(rf"^{re.escape(word)}(?==|$)")
    return Misfit(
        f'Unknown word "{word}" in layout.' + (f' Did you mean "{near[0]}"?' if near else ""),
        why="axes are dp, fsdp, tp, cp, pp and ep; names are ddp, zero1, zero2, zero3 and hsdp",
        tries=[f'write "{" ".join(correct.sub(near[0], w) for w in words)}"'] if near else [],
        do='write for example "ddp", "zero3" or "dp=-1"',
    )


def no_hsdp(text: str, others: Mapping[str, int], world_size: int) -> Misfit:
    """Return that there are no replicas of shards beside other axes."""
    return Misfit(
        f'"{text}" finds no replicas of shards on {world_size} ranks.',
        why="it needs 2 replicas or more, of 2 shards or more: inside a host where there are many",
        tries=of_hsdp(others, world_size),
    )


def written(sizes: Mapping[str, int], names: Sequence[str] = ()) -> str:
    """Return a layout's text."""
    return " ".join([*(f"{axis}={size}" for axis, size in sizes.items()), *names])


def fill_ins(sizes: Mapping[str, int], names: Sequence[str], world_size: int) -> Iterator[str]:
    """Yield advice on sizes of a wrong product: an axis that takes the rest.

    First dp and fsdp, of which any number is right; where there is neither, a new dp. Other axes
    are last: how far tp and ep go, the model says.
    """
    of_any = [axis for axis, facts in FACTS.items() if facts.shares_batch and facts.averages]
    free = [axis for axis in sizes if axis in of_any] or ["dp"]
    for axis in [*free, *({"dp": 0} | dict(sizes))]:
        others = math.prod(size for other, size in sizes.items() if other != axis)
        first = {} if axis in sizes else {axis: -1}
        text = written({**first, **sizes, axis: -1}, names)
        if world_size % others == 0:
            yield f'let nbdist fill one in: "{text}" gives {axis}={world_size // others}'


def of_hsdp(others: Mapping[str, int], world_size: int) -> Iterator[str]:
    """Yield advice where no replicas of shards were found beside other axes."""
    for shards in range(2, world_size // 2 + 1):
        yield f'give a number: "{written(others, ["hsdp"])} fsdp={shards}"'
    yield f'"{written(others, ["zero3"])}" shards over all ranks'
    yield '"zero3" shards over all ranks'


def of_hsdp_sized(number: str, world_size: int) -> Iterator[str]:
    """Yield advice on hsdp that was given a size, which may be meant of either axis."""
    replicas, shards = f'"hsdp dp={number}" has {number} replicas', f'"hsdp fsdp={number}"'
    yield f"{replicas}, {shards} shards of {number}"
    yield replicas
    yield f"{shards} has shards of {number}"
    yield from of_hsdp({}, world_size)


def of_name(words: Sequence[str], name: str, axis: str, number: str) -> Iterator[str]:
    """Yield advice on a name that was given a size."""
    extra = [name] if name in ("zero1", "zero2") else []
    sized = [f"{axis}={number}", *extra]
    said = f"the axis is {axis}"
    yield f'{said}: "{replaced(words, f"{name}={number}", *sized)}"'
    yield f'{said}: "{" ".join(sized)}"'
    yield f'{said}: "{" ".join(["dp=-1", *sized])}"'
    yield f'{said}, and "{name}" gives it all ranks'


def replaced(words: Sequence[str], old: str, *new: str) -> str:
    """Return a text with one word replaced."""
    return " ".join(part for word in words for part in (new if word == old else (word,)))
