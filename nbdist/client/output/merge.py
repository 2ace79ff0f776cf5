"""Make one tidy text of what several ranks showed.

Pure: lists of items in, Jupyter displays out. What several ranks have in common appears once,
labelled with their names; what differs appears rank by rank, a failed rank's first:

    ranks 0-3 │ epoch 1
    rank 0    │ loss 0.71
    ranks 1-3 │ loss 0.69
    ranks 0-3 │ epoch 2

Three steps: `align` finds which items of the ranks are the same (a longest common subsequence,
with a bound on its cost), `arrange` puts them into blocks that keep the order of every rank, and
`render` writes the blocks, cut to a size that a notebook carries easily.
"""

import json
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from nbdist.client.output.slots import Display
from nbdist.shared.text import name_ranks

MAX_LINES = 200
MAX_BYTES = 64 * 1024
MAX_LINE_CHARS = 2000
MAX_DISPLAYS = 20
# Pairs of equal items that one comparison of two ranks may visit: about 50 ms of Python.
MAX_PAIRS = 60_000
_MAX_LABEL = 20
_RESET = "\x1b[0m"


@dataclass(frozen=True, slots=True)
class OutputLine:
    """One line of output, without its line break; stdout and stderr are not distinguished."""

    text: str


@dataclass(frozen=True, slots=True)
class Shown:
    """Something a rank displayed; `value` when it is the value of the cell's last expression."""

    display: Display
    value: bool = False


Item = OutputLine | Shown


@dataclass(frozen=True, slots=True)
class Block:
    """Neighbouring items that exactly these ranks have in common.

    `items` holds what the lowest of `ranks` showed; `differing` names the ranks whose display at
    this place is of the same kind but has other content (only for a rich display, which has
    a block of its own).
    """

    ranks: tuple[int, ...]
    items: tuple[Item, ...]
    differing: tuple[int, ...] = ()


@dataclass(slots=True)
class _Row:
    key: str
    items: dict[int, Item]


def text_of(item: Item) -> list[str] | None:
    """Return the lines of an item that is nothing but text, or None for a rich display."""
    if isinstance(item, OutputLine):
        return [item.text]
    if set(item.display.data) - {"text/plain"}:
        return None
    lines = str(item.display.data.get("text/plain", "")).split("\n")
    if not item.value:
        return lines
    return [("Out: " if i == 0 else "     ") + line for i, line in enumerate(lines)]


def kind_of(display: Display) -> str:
    """Return what a person would call a rich display: `a figure`, `a widget`, ..."""
    mimes = display.data.keys()
    if any(mime.startswith("image/") for mime in mimes):
        return "a figure"
    if any(mime.startswith("application/vnd.jupyter.widget") for mime in mimes):
        return "a widget"
    if any(mime.startswith(("audio/", "video/")) for mime in mimes):
        return "a recording"
    if "text/html" in mimes and "<table" in str(display.data["text/html"]):
        return "a table"
    return "an output"


def _key(item: Item) -> str:
    lines = text_of(item)
    if lines is not None:
        return "text:" + "\n".join(lines)
    assert isinstance(item, Shown)
    # By kind, not by content: rank 1's figure belongs beside rank 0's although they differ.
    return "rich:" + ",".join(sorted(item.display.data))


def _content(item: Item) -> str:
    assert isinstance(item, Shown)
    return json.dumps(item.display.data, sort_keys=True, default=str)


def common_pairs(left: Sequence[str], right: Sequence[str]) -> list[tuple[int, int]]:
    """Return index pairs of a longest common subsequence, ascending in both.

    Hunt and Szymanski's method (CACM 20(5), 1977): cheap when few lines repeat. When more than
    `MAX_PAIRS` pairs are equal only the common beginning and end are returned. A run of
    equal lines without a letter or digit (blank lines, rules) is no reason to align two
    texts, so such runs are left out unless they touch a real one.
    """
    begin, end = 0, 0
    shorter = min(len(left), len(right))
    while begin < shorter and left[begin] == right[begin]:
        begin += 1
    while end < shorter - begin and left[-1 - end] == right[-1 - end]:
        end += 1
    middle = _middle_pairs(left[begin : len(left) - end], right[begin : len(right) - end])
    pairs = [(i, i) for i in range(begin)]
    pairs += [(i + begin, j + begin) for i, j in middle]
    pairs += [(len(left) - k, len(right) - k) for k in range(end, 0, -1)]
    return [pair for run in _runs(pairs) if _speaks(left, run) for pair in run]


def _middle_pairs(left: Sequence[str], right: Sequence[str]) -> list[tuple[int, int]]:
    places: dict[str, list[int]] = {}
    for j, key in enumerate(right):
        places.setdefault(key, []).append(j)
    if sum(len(places.get(key, ())) for key in left) > MAX_PAIRS:
        return []
    ends: list[int] = []  # ends[k]: least right index that ends a common subsequence of k + 1
    chains: list[tuple[int, int, object]] = []
    for i, key in enumerate(left):
        for j in reversed(places.get(key, ())):
            k = bisect_left(ends, j)
            chain = (i, j, chains[k - 1] if k else None)
            if k == len(ends):
                ends.append(j)
                chains.append(chain)
            else:
                ends[k] = j
                chains[k] = chain
    pairs: list[tuple[int, int]] = []
    link: object = chains[-1] if chains else None
    while isinstance(link, tuple):
        pairs.append((link[0], link[1]))
        link = link[2]
    return pairs[::-1]


def _runs(pairs: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    run: list[tuple[int, int]] = []
    for i, j in pairs:
        if run and (i, j) != (run[-1][0] + 1, run[-1][1] + 1):
            yield run
            run = []
        run.append((i, j))
    if run:
        yield run


def _speaks(keys: Sequence[str], run: Sequence[tuple[int, int]]) -> bool:
    return any(keys[i].startswith("rich:") or any(c.isalnum() for c in keys[i][5:]) for i, _ in run)


def align(said: Mapping[int, Sequence[Item]]) -> list[_Row]:
    """Return rows that together hold every item once, each with the ranks that have it there.

    The rows are a common supersequence: read for one rank, they are that rank's items in order.
    """
    ranks_of: dict[tuple[str, ...], list[int]] = {}
    for rank in sorted(said):
        ranks_of.setdefault(tuple(_key(item) for item in said[rank]), []).append(rank)
    rows: list[_Row] = []
    for keys, ranks in ranks_of.items():
        new = [_Row(key, {r: said[r][i] for r in ranks}) for i, key in enumerate(keys)]
        pairs = common_pairs([row.key for row in rows], keys) if rows else []
        merged: list[_Row] = []
        i = j = 0
        for row_index, key_index in pairs:
            merged += rows[i:row_index] + new[j:key_index]
            rows[row_index].items.update(new[key_index].items)
            merged.append(rows[row_index])
            i, j = row_index + 1, key_index + 1
        rows = merged + rows[i:] + new[j:]
    return rows


def arrange(
    said: Mapping[int, Sequence[Item]], failed: AbstractSet[int] = frozenset()
) -> list[Block]:
    """Return the blocks of a tidy transcript.

    Rows that share no rank may change places. They are taken so that blocks are long, and,
    where there is a choice, so that failed ranks come first and then the lowest rank.
    """
    rows = align(said)
    waiting: dict[int, list[int]] = {rank: [] for rank in said}
    for index in range(len(rows) - 1, -1, -1):
        for rank in rows[index].items:
            waiting[rank].append(index)  # the next row of a rank is the last of its list
    blocks: list[Block] = []
    current: tuple[int, ...] = ()
    while heads := {queue[-1] for queue in waiting.values() if queue}:
        ready = [h for h in heads if all(waiting[r][-1] == h for r in rows[h].items)]

        def order(head: int, here: tuple[int, ...] = current) -> tuple[bool, bool, int, int]:
            ranks = rows[head].items
            return (tuple(sorted(ranks)) != here, failed.isdisjoint(ranks), min(ranks), head)

        head = min(ready, key=order)
        current = tuple(sorted(rows[head].items))
        run: list[_Row] = []
        while len(rows[head].items) == len(current) and all(
            waiting[rank] and waiting[rank][-1] == head for rank in current
        ):
            run.append(rows[head])
            for rank in current:
                waiting[rank].pop()
            if not waiting[current[0]]:
                break
            head = waiting[current[0]][-1]
        blocks += _blocks(current, run)
    return blocks


def _blocks(ranks: tuple[int, ...], rows: Sequence[_Row]) -> Iterator[Block]:
    """Yield what these rows make: neighbouring texts together, each rich display alone."""
    texts: list[Item] = []
    for row in rows:
        item = row.items[ranks[0]]
        if text_of(item) is not None:
            texts.append(item)
            continue
        if texts:
            yield Block(ranks, tuple(texts))
            texts = []
        content = _content(item)
        differing = tuple(rank for rank in ranks if _content(row.items[rank]) != content)
        yield Block(ranks, (item,), differing)
    if texts:
        yield Block(ranks, tuple(texts))


def label_of(ranks: Sequence[int]) -> str:
    """Return the label of a block: `rank 2`, `ranks 0-3`, shortened when there are many runs."""
    label = name_ranks(ranks)
    if len(label) <= _MAX_LABEL:
        return label
    count = f"… ({len(ranks)})"
    return label[: _MAX_LABEL - len(count)].rstrip(", -") + count


def render(
    said: Mapping[int, Sequence[Item]],
    *,
    failed: AbstractSet[int] = frozenset(),
    show: str = "",
    whole: str = "",
    max_lines: int = MAX_LINES,
    max_bytes: int = MAX_BYTES,
) -> list[Display]:
    """Return the final displays of a cell: texts (`text/plain`), rich displays between them.

    Args:
        said: For each rank that was asked, its items in order.
        failed: Ranks whose code failed; their text comes first where it differs.
        show: How to see a display that is not shown, with `{rank}` for one rank's number,
            e.g. `nbdist.current().last[{rank}].show()`.
        whole: Where the whole text is kept; ends the line that says how much was left out.
        max_lines: Lines shown at most, labels' lines and notes about cuts aside.
        max_bytes: Bytes of text shown at most, roughly.
    """
    parts = [part for block in arrange(said, failed) for part in _parts(block, show)]
    width = max((len(part.label) for part in parts), default=0)
    shown = _cut(parts, max_lines, whole)
    while max_lines > 8 and sum(len(line) for part in shown for line in part.lines) > max_bytes:
        max_lines //= 2
        shown = _cut(parts, max_lines, whole)
    finals: list[Display] = []
    page: list[str] = []
    for part in shown:
        for i, line in enumerate(part.lines):
            page.append(f"{part.label if i == 0 else '':<{width}} │ {line}".rstrip())
        if part.display is not None:
            finals += [_page(page), part.display]
            page = []
    return [*finals, _page(page)] if page else finals


@dataclass(frozen=True, slots=True)
class _Part:
    """A label, its lines, and the rich display that follows them."""

    label: str
    lines: Sequence[str]
    display: Display | None = None


def _parts(block: Block, show: str) -> Iterator[_Part]:
    texts = [text_of(item) for item in block.items]
    if texts[0] is not None:
        lines = [line for text in texts if text is not None for line in text]
        yield _Part(label_of(block.ranks), lines)
        return
    item = block.items[0]
    assert isinstance(item, Shown)
    kind = kind_of(item.display)
    equal = [rank for rank in block.ranks if rank not in block.differing]
    caption = "Out:" if item.value else kind.split()[-1] + ":"
    yield _Part(label_of(equal), [caption], item.display)
    if block.differing:
        how = f"; to see it: {show.format(rank=block.differing[0])}" if show else ""
        yield _Part(label_of(block.differing), [f"also displayed {kind}{how}"])


def _cut(parts: Sequence[_Part], max_lines: int, whole: str) -> list[_Part]:
    """Return the parts with at most about `max_lines` lines in all.

    Short parts keep all their lines; the long ones share what is left, head and tail equally.
    When there are too many parts, or displays, those in the middle are counted, not shown.
    """
    kept = f"; the whole is kept: {whole}" if whole else ""
    most = max(4, max_lines // 4)
    shown = list(parts)
    if len(parts) > most:
        gone = parts[most // 2 : len(parts) - most // 2]
        lines = sum(len(part.lines) for part in gone)
        shown[most // 2 : len(parts) - most // 2] = [
            _Part("", [f"… {lines:,} lines of {len(gone)} blocks not shown{kept}"])
        ]
    cap = _fair_share([len(part.lines) for part in shown], max_lines)
    displays = 0
    for index, part in enumerate(shown):
        lines_left = list(part.lines)
        if len(lines_left) > cap:
            head = cap // 2
            tail = cap - head - 1
            note = f"… {len(lines_left) - head - tail:,} lines not shown{kept}"
            lines_left[head : len(lines_left) - tail] = [note]
        display = part.display
        displays += display is not None
        if display is not None and displays > MAX_DISPLAYS:
            display = None
            lines_left.append(f"not shown, as the {MAX_DISPLAYS} before fill the cell")
        shown[index] = _Part(part.label, [_clip(line) for line in lines_left], display)
    return shown


def _fair_share(lengths: Sequence[int], total: int) -> int:
    """Return the greatest cap such that the lengths, each cut to it, sum to at most `total`."""
    left, remaining = total, len(lengths)
    for length in sorted(lengths):
        if length * remaining > left:
            return max(3, left // remaining)
        left -= length
        remaining -= 1
    return max(lengths, default=0)


def _clip(line: str) -> str:
    if len(line) > MAX_LINE_CHARS:
        line = line[:MAX_LINE_CHARS] + f"… {len(line) - MAX_LINE_CHARS:,} characters more"
    # A colour that is still on would run into the next line's label.
    if "\x1b[" in line and not line.endswith(_RESET):
        line += _RESET
    return line


def _page(lines: Sequence[str]) -> Display:
    return Display({"text/plain": "\n".join(lines)})
