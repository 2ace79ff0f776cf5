"""Write one run into the spool: what it was made from, its points as they come, how it ended.

Everything here runs on the run's own thread, may wait for a disk or for git, and may raise OSError
and TrackingError: `run` answers both.
"""

import json
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from nbdist.client.metrics.analysis.values import ExplainedStep, RankStep, Straggler
from nbdist.client.metrics.changes import changes_of
from nbdist.client.metrics.recent import recent_steps, values_of_run
from nbdist.client.metrics.telemetry import CellInfo
from nbdist.client.metrics.telemetry import Series as History
from nbdist.client.tracking import provenance
from nbdist.client.tracking.begin import (
    TAG_FACTS,
    RunPlace,
    continued,
    make_begin,
    own_params,
    steps_again,
    summary_of,
)
from nbdist.client.tracking.curves import curves_of, joined
from nbdist.client.tracking.folder import make_private_folder
from nbdist.client.tracking.hiding import hide_secrets
from nbdist.client.tracking.names import merge_facts, params_of
from nbdist.client.tracking.series import Point, RunSeries
from nbdist.client.tracking.shipping.description import TAG, description
from nbdist.client.tracking.spool import SpoolWriter, spool_of
from nbdist.client.tracking.story import story
from nbdist.shared.wire import CHANGES, CONTINUES, NUMERICS, PUBLISHED, TRAINED_BEFORE, Record
from nbdist.study.beside import Beside

Outcome = Literal["finished", "failed", "interrupted"]
SUMMARY_S = 2.0
MOST_HELD = 1000  # points: a run may have no loss
RECENT_S = 2.0  # between points of what recent steps are like
CURVES_S = 5.0  # between what other runs are compared with
EXPLAINED = "layout_explained"  # a fact of some lines: too long for a param
MOST_EXPLAINED = 20_000  # characters
_log = logging.getLogger("nbdist.tracking")
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


class Feed(Protocol):
    """What a run needs of a cell's telemetry."""

    facts: dict[int, dict[str, str]]

    def subscribe(self, callback: Callable[[list[Record]], None]) -> None:
        """Call `callback` with each new record, once."""

    def series(self, key: str) -> dict[int, History]:
        """Return the history of `key` by rank."""


@dataclass(frozen=True, slots=True)
class RunEnd:
    """How a run ended. `error` is text for people, `picture` a PNG.

    `board` is what its board is drawn from again. `files` are more artifacts: where they lie, by
    their names in the run. `beside` is an estimate of it, with what was measured.
    """

    outcome: Outcome
    error: str | None
    picture: bytes | None
    time_ms: int
    verdicts: Sequence[Straggler] = ()
    files: Mapping[str, Path] = field(default_factory=dict)
    board: bytes | None = None
    beside: Beside | None = None


class RunWriter:
    """One run on its way to the disk.

    Args:
        place: Where it goes.
        info: The cell.
        cells: The session's cells so far, this one last.
        feed: The cell's telemetry.
        time_ms: The wall clock of the first record.
        explained: Returns what is known of each rank's steps by comparing them.
    """

    def __init__(
        self,
        place: RunPlace,
        info: CellInfo,
        cells: Sequence[CellInfo],
        feed: Feed,
        time_ms: int,
        explained: Callable[[], Sequence[RankStep]] = tuple,
    ) -> None:
        make_private_folder(place.folder)
        self._explained = explained
        self._place, self._info, self._cells, self._feed = place, info, cells, feed
        keeps_training = any(CONTINUES in facts for facts in dict(feed.facts).values())
        before = continued(place, info, self._facts(), keeps_training=keeps_training)
        self._curves_before = before.curves() if before else {}
        summary_before = before.summary() if before else {}
        steps = "steps_before" if info.attached else "steps"
        self._trained_before = self._told_trained_before()
        if info.attached:
            self._trained_before = summary_before.get("trained_before", self._trained_before)
        again = 0
        if keeps_training and not info.attached:
            again = steps_again(summary_before, self._trained_before)
        self._steps_before = int(summary_before.get(steps, 0)) - again
        # A run keeps its params, as in MLflow; the newest cell's own stand above them.
        self._params = summary_before.get("params", {}) | params_of(info.params)
        self._facts_written: set[str] = set()
        self._taken = {*own_params(info)}
        # The kernel that has begun an attached run knew more of what it was made from.
        self._has_story = info.attached and bool(summary_before.get("has_story"))
        self._summary_at = self._curves_at = time.monotonic()
        self._curves_every_s = CURVES_S
        self._held: list[Point] | None = []  # until the mean loss of a step is known
        self._recent_at, self._recent_every_s = 0.0, RECENT_S
        self.models: dict[str, str] = {}  # published ones: what is said, by their folders
        self._models_before: list[str] = summary_before.get("models", [])
        self._changes_before: list[str] = []
        if not info.attached:  # whose ranks still tell all of this cell's
            self._changes_before = summary_before.get("changes", [])
        self._changes_written: list[str] = []
        self.begin = make_begin(place, info, self._facts(), before, time_ms, again)
        self.series = RunSeries(info.ranks, self.begin.first_step)
        self._spool = SpoolWriter(spool_of(place.folder), self.begin, self.summary("running"))

    def write_story(self) -> None:
        """Write what the run was made from, unless the kernel that had it before has done so."""
        if self._has_story:
            return
        self._spool.params(own_params(self._info))
        folder = self._place.folder.parent
        self._spool.tags(provenance.git_tags(folder))
        for name, content in story(folder, self._cells):
            self._spool.file(name, content)
        self._spool.flush()
        self._has_story = True
        self._write_summary("running")  # which is still there when the rest has been sent

    def add(self, records: list[Record]) -> None:
        """Write the points that these records make certain."""
        self._write_points(self.series.add(records, time.monotonic()))

    def _write_points(self, points: list[Point], is_last: bool = False) -> None:
        """Write points, the mean loss first: MLflow compares runs by the metric that came first."""
        if self._held is not None:
            self._held += points
            first = next((point for point in self._held if "loss" in point.values), None)
            if first is None and not is_last and len(self._held) < MOST_HELD:
                return
            points = [first, *(p for p in self._held if p is not first)] if first else self._held
            self._held = None
        self._spool.points(points)

    def add_explained(self, steps: Sequence[ExplainedStep]) -> None:
        """Write the points of steps that `CellAnalysis` has compared."""
        self._spool.points(self.series.add_explained(steps))

    def tick(self) -> None:
        """Write what is due now and then, and hand all to the operating system."""
        now_s = time.monotonic()
        if now_s - self._recent_at > self._recent_every_s:
            self._write_recent()
            self._recent_at = time.monotonic()
            self._recent_every_s = max(RECENT_S, 100 * (self._recent_at - now_s))
        self._write_facts(settled_only=True)
        self._spool.flush()
        if now_s - self._summary_at > SUMMARY_S:
            self._summary_at = now_s
            self._write_summary("running")
        if now_s - self._curves_at > self._curves_every_s:
            self._write_curves()
            self._curves_at = time.monotonic()
            # A long history of many ranks takes tenths of a second: a hundredth of our time.
            self._curves_every_s = max(CURVES_S, 100 * (self._curves_at - now_s))

    def end(self, end: RunEnd) -> None:
        """Write the end of the run; all of it is on the disk when this returns."""
        spool = self._spool
        self._write_points(self.series.finish(), is_last=True)
        self._write_recent()
        self._write_facts(settled_only=False)
        if end.error:
            text = hide_secrets(_ANSI.sub("", end.error))
            spool.file("error.txt", text.encode())
            if end.outcome == "failed":
                spool.tags({"nbdist.error": text.strip().splitlines()[0][:250] if text else ""})
        if end.verdicts:
            said = [verdict.sentence for verdict in end.verdicts]
            spool.tags({"nbdist.verdict": "; ".join(said)[:1000]})
            spool.file("verdicts.txt", ("\n".join(said) + "\n").encode())
        if end.picture:
            spool.file("board.png", end.picture)
        if end.beside:
            spool.tags({"nbdist.estimate": end.beside.sentence})
            spool.file("estimate.txt", f"{end.beside}\n".encode())
        self._write_description(end)
        for name, path in end.files.items():
            spool.file(name, path.read_bytes())
        # A clock that was set back must not let a run end before it began.
        write_end(spool, end.outcome, max(end.time_ms, self.begin.time_ms))
        # Before the summary: a run that it tells as finished must not end as KILLED in MLflow.
        spool.flush(to_disk=True)
        self._write_curves()
        self._write_summary(end.outcome)
        if end.board:
            self._keep_board(end.board)

    def close(self) -> None:
        """Let go of the run."""
        self._spool.close()

    def _keep_board(self, board: bytes) -> None:
        try:
            self._spool.board(board)
        except OSError as error:  # the run is whole without it
            _log.warning("the board of run %s was not kept: %s", self.begin.name, error)

    def _write_recent(self) -> None:
        """Write what the last steps were like: the numbers that the board shows."""
        steps = recent_steps(self._feed.series)
        self._spool.points(self.series.recent(values_of_run(steps, self._explained())))

    def _write_curves(self) -> None:
        own = curves_of(self._feed.series, self.begin.first_step)
        self._spool.curves(joined(self._curves_before, own))

    def _write_description(self, end: RunEnd) -> None:
        series, facts = self.series, self._facts() | own_params(self._info)
        text = description(
            end.outcome,
            self._steps_before + series.steps,
            series.last,
            facts,
            [verdict.sentence for verdict in end.verdicts],
            self._changes(),
            keys=series.keys,
            attempt=self.begin.attempt,
            has_picture=end.picture is not None,
        )
        self._spool.tags({TAG: hide_secrets(text)})

    def _facts(self) -> dict[str, str]:
        # dict() copies in one step of the interpreter; the IO thread may be adding to it.
        by_rank = dict(self._feed.facts)
        facts = merge_facts(by_rank[rank] for rank in sorted(by_rank))
        facts.pop(EXPLAINED, None)
        facts.pop(PUBLISHED, None)
        facts.pop(CHANGES, None)
        facts.pop(CONTINUES, None)
        facts.pop(TRAINED_BEFORE, None)
        facts.pop(NUMERICS, None)
        return facts

    def _numerics(self) -> str:
        """Return the folder of what the steps have computed; "" where none is kept."""
        by_rank = dict(self._feed.facts).values()
        return next((facts[NUMERICS] for facts in by_rank if NUMERICS in facts), "")

    def _told_trained_before(self) -> int | None:
        by_rank = dict(self._feed.facts).values()
        told = next((facts[TRAINED_BEFORE] for facts in by_rank if TRAINED_BEFORE in facts), None)
        return None if told is None else int(told)

    def _write_facts(self, settled_only: bool) -> None:
        """Write facts as params, each once: a param that changed would be refused.

        A fact is settled when every rank has its own.
        """
        by_rank = dict(self._feed.facts)
        self._write_layout(by_rank)
        self._write_models(by_rank)
        self._write_changes()
        fresh: dict[str, str] = {}
        tags: dict[str, str] = {}
        for key, value in self._facts().items():
            by_all = all(key in by_rank.get(rank, {}) for rank in self._info.ranks)
            if key in self._facts_written or (settled_only and not by_all):
                continue
            self._facts_written.add(key)
            if key in TAG_FACTS or key in self._taken:
                tags[f"nbdist.{key}"] = hide_secrets(value)
            else:
                fresh |= params_of({key: value})
        if fresh:
            self._spool.params(fresh)
        if tags:
            self._spool.tags(tags)

    def _write_layout(self, by_rank: Mapping[int, Mapping[str, str]]) -> None:
        """Write what the layout does to the model, as the first rank that knows tells it."""
        texts = [facts[EXPLAINED] for facts in by_rank.values() if EXPLAINED in facts]
        if texts and EXPLAINED not in self._facts_written:
            self._facts_written.add(EXPLAINED)
            text = hide_secrets(texts[0][:MOST_EXPLAINED])
            self._spool.file("layout.txt", f"{text}\n".encode())

    def _changes(self) -> list[str]:
        """Return what was changed by hand in this run, in words."""
        own = (
            replace(one, step=one.step + self.begin.first_step)
            for one in changes_of(self._feed.facts)
        )
        return [*self._changes_before, *(hide_secrets(str(one)) for one in own)]

    def _write_changes(self) -> None:
        if (changes := self._changes()) != self._changes_written:
            self._changes_written = changes
            self._spool.tags({"nbdist.changes": "; ".join(changes)[:1000]})

    def _write_models(self, by_rank: Mapping[int, Mapping[str, str]]) -> None:
        """Take over the models that the cell has published."""
        for facts in by_rank.values():
            for model in json.loads(facts.get(PUBLISHED, "[]")):
                folder, name, alias = model["folder"], model["name"], model["alias"]
                if folder in self.models:
                    continue
                self.models[folder] = f"models:/{name}@{alias}" if alias else f"models:/{name}"
                if Path(folder).is_dir():
                    self._spool.model(Path(folder), model)
                    self._write_summary("running")  # who goes on with the run knows where it went
                    self._spool.take(Path(folder))
                elif folder not in self._models_before:
                    _log.warning("model %s is not sent: %s is not on this machine", name, folder)
                    self._spool.tags({"nbdist.model_lost": f"{name}: {folder}"})

    def _write_summary(self, status: str) -> None:
        self._spool.summary(self.summary(status))

    def summary(self, status: str) -> Mapping[str, Any]:
        """Return what `%dist runs` shows of this run."""
        begin, info, series, facts = self.begin, self._info, self.series, self._facts()
        changes = self._changes()
        return summary_of(begin, info, status) | {
            "steps": self._steps_before + series.steps,
            "steps_before": self._steps_before,
            "last_step": series.last_step,
            "trained_before": self._trained_before,
            "values": series.last,
            "losses_before": series.losses_before,
            "user_keys": series.user_keys,
            "params": self._params,
            "has_story": self._has_story,
            "models": [*self._models_before, *self.models],
            "changes": changes,
            "numerics": self._numerics(),
            "facts": self._params
            | own_params(info)
            | params_of(facts)
            | ({"by hand": "; ".join(changes)} if changes else {})
            | _versions(begin.tags),
            "layout": facts.get("layout", ""),
        }


def write_end(spool: SpoolWriter, outcome: Outcome, time_ms: int) -> None:
    """Write how a run or a study ended, as MLflow knows it.

    What a person has interrupted is no failure, and MLflow shows its KILLED in red as one: it is
    finished, with a tag that says how.
    """
    if outcome == "interrupted":
        spool.tags({"nbdist.ended": "interrupted"})
    spool.end("FAILED" if outcome == "failed" else "FINISHED", time_ms)


def _versions(tags: Mapping[str, str]) -> dict[str, str]:
    """Return of a run's tags what tells one program from another."""
    names = {
        "mlflow.source.git.commit": "commit",
        "nbdist.git_dirty": "changed since",
        "nbdist.version": "nbdist",
        "nbdist.python": "python",
    }
    return {name: tags[tag][:12] for tag, name in names.items() if tag in tags}
