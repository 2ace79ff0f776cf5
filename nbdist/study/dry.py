"""Prove from what each rank would call whether a cell comes to its end. Pure.

Each rank's calls are followed at once: a collective ends when all ranks of its group have come to
it, a message when both sides have. Calls with the same number in a group must agree, as on real
ranks (`engine/tap/collective_check`). Where no rank can go on, those that have not ended hang.

Only what all agree on is left out: of a loop over 1,250 batches a rank has run three, and all skip
as many. A rank with more batches than others makes those that they lack, up to two. Where ranks do
not share their turns (`cut_apart`), nothing follows from what comes behind them.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

from nbdist.shared.collectives import COLLECTIVES
from nbdist.shared.text import counted, name_bytes, name_ranks

Loop = tuple[str, int]  # its place, and the how many-th of that place on a rank
Kind = Literal["hang", "mismatch", "uneven", "branch", "memory", "error"]
_MORE = 2  # batches that a rank makes which others lack
_AHEAD = 200  # calls that one rank may make alone, for their first to be told


@dataclass(frozen=True, slots=True)
class Call:
    """What one rank calls, or the beginning of a batch.

    Attributes:
        kind: As in `nbdist.shared.collectives`, "send", "recv", "new_group", or the name of another
            function that all ranks call together; of a batch "turn".
        place: In the cell: "line 12", or "cell 3, line 2" of a function of another cell.
        ranks: Of the group, in the world.
        group: Its name, equal on all ranks.
        count: Elements that must be equal on all ranks; 0 where they need not, or are not known.
        dtype: Such as "float32".
        reduction: Such as "SUM"; "" without one.
        peer: The root, or the other rank of a message, in the world; -1 for none, or for any.
        tag: Of a message.
        waits: The rank goes on only when the call has ended.
        loop: Of a turn.
        turn: Its number, from 1; 0 is the end of the loop.
        of: Batches that the loop has.
    """

    kind: str
    place: str
    ranks: tuple[int, ...] = ()
    group: str = ""
    count: int = 0
    dtype: str = ""
    reduction: str = ""
    peer: int = -1
    tag: int = 0
    waits: bool = True
    loop: Loop = ("", 0)
    turn: int = 0
    of: int = 0

    @property
    def is_message(self) -> bool:
        """Whether it goes from one rank to one other."""
        return self.kind in ("send", "recv")

    def __str__(self) -> str:
        text = self.kind
        if self.is_message:
            text += f" {'to' if self.kind == 'send' else 'from'} "
            text += "any rank" if self.peer < 0 else f"rank {self.peer}"
            text += f" with tag {self.tag}" if self.tag else ""
        elif self.peer >= 0:
            text += f" {getattr(COLLECTIVES.get(self.kind), 'root', '') or 'at'} rank {self.peer}"
        text += f" ({self.reduction})" if self.reduction not in ("", "SUM") else ""
        text += f" of {self.count:,} {self.dtype}" if self.count else ""
        text += f" of {self.dtype}" if self.dtype and not self.count else ""
        return f"{text} at {self.place}"


@dataclass(frozen=True, slots=True)
class Branch:
    """A place that decides by a number in a tensor, which is not known.

    Attributes:
        place: In the cell.
        value: Equal on ranks whose numbers come from the same numbers by the same operations.
        answer: What was taken for it.
    """

    place: str
    value: int
    answer: bool


@dataclass(frozen=True, slots=True)
class Trace:
    """What one rank did.

    Attributes:
        calls: In order.
        end: It came to the cell's end; an error; what cannot be known; too little time; a call
            whose answer never comes; the cell does not run there.
        place: Where, unless it came to the end.
        said: The error, or what is not known.
        branches: In order.
        peak: The most bytes of tensors that were alive at once.
        over: Where these came to be more than a rank may have; "" if they did not.
        brought: What it gave its peers to read, but for numbers that are not known.
        asks_rank: Code beside the cell's and ours asked which rank it is, or drew random numbers.
    """

    calls: tuple[Call, ...] = ()
    end: Literal["end", "error", "unknown", "time", "waits", "absent"] = "end"
    place: str = ""
    said: str = ""
    branches: tuple[Branch, ...] = ()
    peak: int = 0
    over: str = ""
    brought: tuple[bytes, ...] = ()
    asks_rank: bool = False

    @property
    def collectives(self) -> int:
        """How many calls it makes, with those of batches that were left out."""
        total, number, before = 0, 0, 0
        loop: dict[Loop, tuple[int, int]] = {}  # the newest turn of each, and the calls before it
        for call in self.calls:
            if call.kind != "turn":
                total += 1
                continue
            number, before = loop.get(call.loop, (0, total))
            total += (total - before) * max(call.turn - number - 1, 0)
            loop[call.loop] = call.turn, total
        return total


@dataclass(frozen=True, slots=True)
class Finding:
    """What would go wrong.

    Attributes:
        kind: Of the mistake.
        places: In the cell, of each side.
        text: A sentence without its stop.
    """

    kind: Kind
    places: tuple[str, ...]
    text: str


@dataclass(frozen=True, slots=True)
class DryRun:
    """What a cell would do on ranks that are not there. Predicted: no number was computed.

    Attributes:
        world_size: Ranks.
        findings: What goes wrong, the surest first.
        unknown: What is not known, in sentences.
        collectives: Calls of collectives and messages, by rank; without those of ranks whose end
            is not known.
        peak: Bytes of tensors that a rank's cell holds at once, the most of all ranks.
        notes: What the answer rests on, in sentences.
    """

    world_size: int
    findings: tuple[Finding, ...] = ()
    unknown: tuple[str, ...] = ()
    collectives: Mapping[int, int] = field(default_factory=dict)
    peak: int = 0
    notes: tuple[str, ...] = ()

    @property
    def is_sound(self) -> bool:
        """Whether nothing was found, and all is known."""
        return not self.findings and not self.unknown

    def __str__(self) -> str:
        lines = [f"{one.text[:1].upper()}{one.text[1:]}." for one in self.findings]
        if not lines and len(self.collectives) == self.world_size:
            least, most = min(self.collectives.values()), max(self.collectives.values())
            calls = f"{least:,}" if least == most else f"{least:,} to {most:,}"
            each = "each makes " if self.world_size > 1 else "it makes "
            lines.append(
                f"{counted(self.world_size, 'rank')} run{'s' * (self.world_size == 1)} it to its "
                f"end; {each}{calls} collective{'s' * (calls != '1')}; "
                f"tensors take at most {name_bytes(self.peak)} a rank."
            )
        elif not lines:
            lines.append("Nothing wrong was found as far as is known.")
        ranks = counted(self.world_size, "rank")
        rests_on = f"Predicted for {ranks}, on tensors with shapes and no numbers."
        return "\n".join([*lines, *self.unknown, *self.notes, rests_on])


def judge(traces: Mapping[int, Trace]) -> list[Finding]:
    """Return what goes wrong on ranks that do this; nothing where all come to their end.

    Where a rank's end is not known, only what is wrong before it is told.
    """
    if errors := {rank: one for rank, one in traces.items() if one.end == "error"}:
        by_text = _by_text((rank, f"{one.said} at {one.place}") for rank, one in errors.items())
        return [
            Finding("error", (errors[of[0]].place,), f"{_verb(of, 'raises', 'raise')} {said}")
            for said, of in by_text.items()
        ]
    world = _World(traces)
    try:
        world.run()
    except _DiffersError as error:
        return [error.finding]
    return world.stuck()


def cut_apart(traces: Mapping[int, Trace]) -> set[str]:
    """Return the places of loops that have to be run whole: ranks do not share their turns.

    Where they do, all ranks of a group make as many calls in a turn, and a rank receives as many
    messages as are sent to it. Else a turn that was left out may make what another lacks, as in
    `if step % world_size != rank: continue`.
    """
    cut = {loop for one in traces.values() for _, loop in _cuts(one.calls)}
    sides: dict[str, Sequence[object]] = {}  # whose calls have to be as many, by group or receiver
    made: dict[tuple[Loop, str], dict[object, Counter[int]]] = {}
    for rank, one in traces.items():
        inside: dict[Loop, int] = {}  # the how many-th turn that was run, the innermost loop last
        for call in one.calls if cut else ():
            if call.kind == "turn":
                number = inside.pop(call.loop, 0) + 1
                if call.turn and call.loop in cut:
                    inside[call.loop] = number
            elif inside:
                loop, number = next(reversed(inside.items()))
                receiver = call.peer if call.kind == "send" else rank
                where = f"to {receiver}" if call.is_message else call.group
                sides[where] = ("send", "recv") if call.is_message else call.ranks
                by_side = made.setdefault((loop, where), defaultdict(Counter))
                by_side[call.kind if call.is_message else rank][number] += 1
    unclear = {rank for rank, one in traces.items() if one.end in ("unknown", "time")}
    return {
        loop[0]
        for (loop, where), by_side in made.items()
        if any(
            by_side[side] != by_side[other]
            for side, other in pairwise(one for one in sides[where] if one not in unclear)
        )
    }


def before_cuts(trace: Trace, places: Collection[str]) -> Trace:
    """Return what a rank did until turns were left out of loops at these places."""
    cuts = (at for at, loop in _cuts(trace.calls) if loop[0] in places)
    at = next(cuts, None)
    return trace if at is None else replace(trace, calls=trace.calls[:at], end="unknown")


def _cuts(calls: Sequence[Call]) -> Iterator[tuple[int, Loop]]:
    """Yield where turns of a loop were left out, and of which."""
    newest: dict[Loop, int] = {}
    for at, call in enumerate(calls):
        if call.kind == "turn":
            if call.turn > newest.get(call.loop, 0) + 1:
                yield at, call.loop
            newest[call.loop] = call.turn


def over_memory(traces: Mapping[int, Trace], memory: int) -> list[Finding]:
    """Return the finding that ranks need more than they have, in bytes; 0 asks for none."""
    over = {rank: one for rank, one in traces.items() if memory and one.peak > memory}
    if not over:
        return []
    most = max(over, key=lambda rank: over[rank].peak)
    text = (
        f"out of memory at {counted(len(traces), 'rank')}: {name_bytes(over[most].peak)} a rank "
        f"where it has {name_bytes(memory)}; {_verb(sorted(over), 'passes', 'pass')} that at "
        f"{over[most].over}"
    )
    return [Finding("memory", (over[most].over,), text)]


def unknown_ends(traces: Mapping[int, Trace]) -> list[str]:
    """Return sentences on ranks whose end is not known."""
    ends = _by_text(
        (rank, f"from {one.place} on: {one.said}")
        for rank, one in traces.items()
        if one.end in ("unknown", "time")
    )
    return [f"Not known of {name_ranks(ranks)} {text}." for text, ranks in ends.items()]


class _DiffersError(Exception):
    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.text)
        self.finding = finding


@dataclass(slots=True)
class _Step:
    """One call of one rank, and the batch that it is of."""

    call: Call
    turn: Call | None


@dataclass(slots=True, eq=False)
class _Post:
    """A call that a rank has come to."""

    rank: int
    step: _Step
    number: int = 0  # in its group; of a message 0
    is_done: bool = False

    @property
    def call(self) -> Call:
        return self.step.call


class _World:
    def __init__(self, traces: Mapping[int, Trace]) -> None:
        self._traces = traces
        self._batches = _batches(traces)
        self._least = {loop: min(of.values()) for loop, of in self._batches.items()}
        self._steps = {rank: self._expanded(one.calls) for rank, one in traces.items()}
        self._next = dict.fromkeys(traces, 0)
        self._numbers: dict[tuple[int, str], int] = defaultdict(int)
        self._posts: dict[tuple[str, int], dict[int, _Post]] = defaultdict(dict)
        self._messages: list[_Post] = []  # not matched
        self._waiting: dict[int, _Post] = {}

    def _expanded(self, calls: Sequence[Call]) -> list[_Step]:
        """Return a rank's calls with batches that other ranks lack."""
        found: list[Call] = []
        begins: dict[Loop, int] = {}
        for call in calls:
            if call.kind == "turn":
                least, was = self._least[call.loop], begins.get(call.loop, 0)
                gap = call.turn - (found[was].turn if found and call.loop in begins else 0) - 1
                more = min(_MORE, gap, max(call.of - least, 0)) if call.turn > 1 else 0
                body = found[was:]
                for number in range(call.turn - more, call.turn):
                    found += [replace(body[0], turn=number), *body[1:]] if body else []
                begins[call.loop] = len(found)
            found.append(call)
        steps: list[_Step] = []
        turns: list[Call] = []
        for call in found:
            if call.kind == "turn":
                turns = [one for one in turns if one.loop != call.loop] + [call] * (call.turn > 0)
            else:
                steps.append(_Step(call, turns[-1] if turns else None))
        return steps

    def run(self) -> None:
        """Let all ranks go as far as they can.

        Raises:
            _DiffersError: Two make other calls where theirs must agree.
        """
        ready = deque(self._steps)
        while ready:
            rank = ready.popleft()
            while rank not in self._waiting and self._next[rank] < len(self._steps[rank]):
                post = _Post(rank, self._steps[rank][self._next[rank]])
                self._next[rank] += 1
                call = post.call
                ended = self._meet(post) if call.is_message else self._join(post)
                if call.waits and not post.is_done:
                    self._waiting[rank] = post
                for one in ended:
                    if self._waiting.get(one.rank) is one:
                        del self._waiting[one.rank]
                        ready.append(one.rank)

    def _join(self, post: _Post) -> list[_Post]:
        """Come to a collective; return the calls that have ended by it."""
        call = post.call
        self._numbers[post.rank, call.group] += 1
        post.number = self._numbers[post.rank, call.group]
        there = self._posts[call.group, post.number]
        first = next(iter(there.values()), post).call
        there[post.rank] = post
        if _key(first) != _key(call):
            found = self._mismatch(call.group, post.number, call.ranks)
            raise _DiffersError(self._first_alone(found, call.group, next(iter(there)), post.rank))
        if len(there) < len(call.ranks):
            return []
        for one in there.values():
            one.is_done = True
        return list(there.values())

    def _meet(self, post: _Post) -> list[_Post]:
        """Come to a message; return both sides where the other has come."""
        for other in self._messages:
            if _fit(post, other):
                self._messages.remove(other)
                post.is_done = other.is_done = True
                one, two = sorted((post, other), key=lambda side: side.call.kind, reverse=True)
                if (one.call.count, one.call.dtype) != (two.call.count, two.call.dtype):
                    text = f"rank {one.rank} calls {one.call}; rank {two.rank} calls {two.call}"
                    places = (one.call.place, two.call.place)
                    raise _DiffersError(Finding("mismatch", places, text))
                return [post, other]
        self._messages.append(post)
        return []

    def _mismatch(self, group: str, number: int, ranks: Sequence[int]) -> Finding:
        every = {rank: self._of_group(rank, group)[number - 1 : number] for rank in ranks}
        found = [step for own in every.values() for step in own]
        sides = _by_text((rank, str(step.call)) for rank, own in every.items() for step in own)
        text = "; ".join(f"{_verb(of, 'calls', 'call')} {said}" for said, of in sides.items())
        if never := [rank for rank, own in every.items() if not own and self._ends(rank)]:
            text += f"; {_verb(never, 'ends', 'end')} the cell without it"
        places = tuple(dict.fromkeys(step.call.place for step in found))
        return self._uneven(Finding("mismatch", places, text), found)

    def _ends(self, rank: int) -> bool:
        return rank in self._traces and self._traces[rank].end in ("end", "absent")

    def _uneven(self, finding: Finding, steps: Sequence[_Step]) -> Finding:
        """Return the finding, told by batches where one is in a batch that other ranks lack."""
        for turn in (step.turn for step in steps if step.turn is not None):
            if turn.turn <= self._least[turn.loop]:
                continue
            by_count: dict[int, list[int]] = {}
            for rank, of in self._batches[turn.loop].items():
                by_count.setdefault(of, []).append(rank)
            first, *rest = sorted(by_count.items())
            text = f"{_verb(first[1], 'stops', 'stop')} at batch {first[0]:,} of the loop at "
            text += turn.loop[0]
            text += "".join(f", {name_ranks(ranks)} at {of:,}" for of, ranks in rest)
            return Finding("uneven", (turn.loop[0], *finding.places), f"{text}; {finding.text}")
        return finding

    def stuck(self) -> list[Finding]:
        """Return why ranks do not come to their end, where that is sure."""
        for post in [*self._waiting.values(), *self._left_open()]:
            missing = self._missing(post)
            if missing and all(self._ends(r) and r not in self._waiting for r in missing):
                return [self._lonely(post, missing)]
        if not self._waiting or not all(self._ends(r) or r in self._waiting for r in self._traces):
            return []
        waiting = sorted(self._waiting.items())
        sides = _by_text((rank, str(post.call)) for rank, post in waiting)
        told = [f"{_verb(of, 'waits', 'wait')} in {said}" for said, of in sides.items()]
        places = tuple(dict.fromkeys(one.call.place for one in self._waiting.values()))
        found = Finding("hang", places, f"{'; '.join(told)}: none can go on")
        return [self._uneven(found, [one.step for one in self._waiting.values()])]

    def _left_open(self) -> list[_Post]:
        """Return calls that their ranks did not wait for, and that never end."""
        return [
            post
            for there in (*self._posts.values(), dict(enumerate(self._messages)))
            for post in there.values()
            if not post.is_done and not post.call.waits
        ]

    def _missing(self, post: _Post) -> list[int]:
        call = post.call
        if call.is_message:
            return [call.peer] if call.peer >= 0 else [r for r in call.ranks if r != post.rank]
        there = self._posts[call.group, post.number]
        return [rank for rank in call.ranks if rank not in there]

    def _lonely(self, post: _Post, missing: Sequence[int]) -> Finding:
        """Return the finding of a call that ranks end the cell without."""
        call = post.call
        if call.is_message:
            other = "recv" if call.kind == "send" else "send"
            text = f"rank {post.rank} calls {call}; {_verb(missing, 'ends', 'end')} the cell "
            text += f"without the {other} that it waits for"
            return self._uneven(Finding("hang", (call.place,), text), [post.step])
        there = self._posts[call.group, post.number]
        sides = _by_text((rank, str(one.call)) for rank, one in sorted(there.items()))
        alone = " alone" if len(there) == 1 else ""
        told = [
            f"{name_ranks(of)}{alone} {'calls' if len(of) == 1 else 'call'} {said}"
            for said, of in sides.items()
        ]
        told.append(f"{_verb(missing, 'ends', 'end')} the cell without it")
        places = tuple(dict.fromkeys(one.call.place for one in there.values()))
        steps = [one.step for one in there.values()]
        found = self._uneven(Finding("hang", places, "; ".join(told)), steps)
        return self._first_alone(found, call.group, post.rank, missing[0])

    def _first_alone(self, finding: Finding, group: str, rank: int, other: int) -> Finding:
        """Return the finding, told from the first call that one of two ranks makes alone.

        Such a call may meet another of the same kind, so that a later one is found.
        """
        own, others = ([s.call for s in self._of_group(r, group)] for r in (rank, other))
        alone = _alone(own, others)
        if alone is None or finding.kind == "uneven" or alone.place in finding.places:
            return finding
        places = {r: {s.call.place for s in self._of_group(r, group)} for r in alone.ranks}
        callers = [r for r in alone.ranks if alone.place in places[r]]
        text = f"{_verb(callers, 'calls', 'call')} {alone}, and others do not; {finding.text}"
        return replace(finding, places=(alone.place, *finding.places), text=text)

    def _of_group(self, rank: int, group: str) -> list[_Step]:
        """Return a rank's collectives in a group."""
        steps = self._steps.get(rank, ())
        return [one for one in steps if one.call.group == group and not one.call.is_message]


def _alone(own: Sequence[Call], others: Sequence[Call]) -> Call | None:
    """Return the first call of two ranks' that one of them makes and the other does not.

    As many others in its place, as of a root and its peers at lines of their own, are none.
    """
    mine, theirs = ([(call.place, _key(call)) for call in side] for side in (own, others))
    at = 0
    while at < min(len(mine), len(theirs)):
        if mine[at] == theirs[at]:
            at += 1
            continue
        for ahead in range(1, _AHEAD):
            if mine[at + ahead : at + ahead + 1] == theirs[at : at + 1]:
                return own[at]
            if theirs[at + ahead : at + ahead + 1] == mine[at : at + 1]:
                return others[at]
            if mine[at + ahead : at + ahead + 1] == theirs[at + ahead : at + ahead + 1]:
                at += ahead
                break
        else:
            return None
    return next(iter([*own[at:], *others[at:]]), None)


def _batches(traces: Mapping[int, Trace]) -> dict[Loop, dict[int, int]]:
    """Return how many batches each loop has, by rank."""
    found: dict[Loop, dict[int, int]] = {}
    for rank, one in traces.items():
        for call in one.calls:
            if call.kind == "turn":
                found.setdefault(call.loop, {})[rank] = call.of
    return found


def _key(call: Call) -> tuple[object, ...]:
    """Return what calls of one collective must agree on."""
    return call.kind, call.count, call.dtype, call.reduction, call.peer


def _fit(one: _Post, other: _Post) -> bool:
    """Return whether two calls are the sides of one message."""
    a, b = one.call, other.call
    return (
        {a.kind, b.kind} == {"send", "recv"}
        and (a.group, a.tag) == (b.group, b.tag)
        and a.peer in (other.rank, -1)
        and b.peer in (one.rank, -1)
    )


def _by_text(said: Iterable[tuple[int, str]]) -> dict[str, list[int]]:
    """Return the ranks of each text."""
    found: dict[str, list[int]] = {}
    for rank, text in said:
        found.setdefault(text, []).append(rank)
    return found


def _verb(ranks: Sequence[int], one: str, many: str) -> str:
    return f"{name_ranks(ranks)} {one if len(ranks) == 1 else many}"
