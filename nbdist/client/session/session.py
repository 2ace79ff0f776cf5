"""One cluster of ranks as the notebook uses it: start, run, push, pull, status, stop.

The state machine: a session is running from `start` to `stop`; while a cell runs, another is
refused. `client/notebook/current.py` holds the kernel's current one.
"""

import atexit
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from nbdist.client.board.past import Past
from nbdist.client.board.views import require_view
from nbdist.client.cells import interrupts
from nbdist.client.cells.cell_context import CellContext
from nbdist.client.cells.halts import TIMEOUT_S, Changed, Paused, Peeked
from nbdist.client.cells.interrupts import Interrupts
from nbdist.client.cells.params import require_params
from nbdist.client.cells.replays import Replayed
from nbdist.client.cells.request import CellRequest, check_syntax, find_module, read_script
from nbdist.client.cells.retries import CellAttempts
from nbdist.client.cells.status import Stacks, Status
from nbdist.client.cells.trained_cell import TrainedCell
from nbdist.client.cluster.cluster import Cluster
from nbdist.client.cluster.memory import ClusterMemory
from nbdist.client.faults.recovery import restart
from nbdist.client.metrics.analysis.values import Straggler
from nbdist.client.metrics.changes import Change
from nbdist.client.metrics.checks.settings import Setting, require_rules, states_of
from nbdist.client.metrics.checks.table import Checks
from nbdist.client.metrics.cost import Cost
from nbdist.client.metrics.numerics.layouts import LayoutDiff
from nbdist.client.metrics.profile.chosen import parse_steps
from nbdist.client.metrics.profile.gather import Profiled
from nbdist.client.output.result import CellResult
from nbdist.client.session.chaos import Chaos, ChaosPlan
from nbdist.client.session.probe import LinkProbe, both_ways, choose_pairs, links, of_newest
from nbdist.client.session.rank_names import RankNames
from nbdist.client.session.scale import scale
from nbdist.client.session.sweep import SweepResult, combinations, sweep
from nbdist.client.session.transfer import pull, push
from nbdist.shared.errors import ClusterError, Interrupted, LayoutError, UsageError
from nbdist.shared.options import ANIMATIONS, ClusterOptions, is_number, is_whole, require_word
from nbdist.shared.text import begin_with_ranks, parse_ranks
from nbdist.study.fit import fit

if TYPE_CHECKING:  # for its type alone: it loads matplotlib
    from nbdist.client.board.drawn.animation import Animation

_SETTLE_TIMEOUT_S = 10.0  # of a cell after an interrupt; the second one kills its ranks
_STOP_INTERRUPTS = 3


class Session:
    """A running cluster. Made by `nbdist.start`; also a context manager that stops it."""

    def __init__(self, cluster: Cluster, showing: CellContext, describe: str) -> None:
        """Take over a started cluster; `describe` is one line about it."""
        self.describe = describe
        self.unreached: tuple[str, ...] = ()  # what may run on after `stop`, in sentences
        self.rank_names = RankNames(cluster.requests)  # for Tab and Shift+Tab
        self._cluster = cluster
        self._showing = showing
        self._attempts = CellAttempts(cluster, showing)
        self._stopped_at: float | None = None
        self._chaos: Chaos | None = None
        self._at_stop: list[Callable[[], None]] = []
        self._busy = threading.Lock()
        self._judge: Callable[[Session, str], str]
        self._note_sent: Callable[[str, Mapping[str, Any], str], None] = lambda *_: None
        self._left: Mapping[str, Any] | None = None  # the cell that another kernel has left

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        assert self._cluster.options is not None
        return self._cluster.options.n

    @property
    def options(self) -> ClusterOptions:
        """The options with which the cluster was started."""
        assert self._cluster.options is not None
        return self._cluster.options

    @property
    def last(self) -> CellResult | None:
        """The result of the last cell; None before the first."""
        return self._attempts.last

    @property
    def verdicts(self) -> tuple[Straggler, ...]:
        """The ranks that made others slow in the newest cell that trains, and why; may be empty.

        While a cell runs they are those of now, over its last 50 steps. Any thread.
        """
        return self._showing.verdicts

    @property
    def alarms(self) -> tuple[str, ...]:
        """Problems in the newest cell's training, in sentences, the oldest first.

        Such as replicas that differ. While a cell runs they are those of now.
        """
        return self._showing.alarms

    def checks(self, setting: Setting | None = None) -> Checks:
        """Return the rules on silent mistakes: their states, what they found, what they cost.

        Args:
            setting: `off`, `warn` or `raise` for all rules from the next cell on, or a dict of
                these by the names of rules, and `all` for the others. None changes nothing.

        Raises:
            UsageError: There is no such state or rule.
        """
        if setting is not None:
            self._showing.states = states_of(setting)
        rules = self._showing.rules()
        if rules.cost is None or not self.is_running:
            return rules
        us = [line.us for line in self.cost.lines if (line.part, line.where) == ("checks", "rank")]
        return replace(rules, cost=replace(rules.cost, rank_us=us[0])) if us else rules

    @property
    def profile(self) -> Profiled | None:
        """The recording of the last cell with `profile`: `said`, `text`, and the file `trace`."""
        return self._attempts.profile

    @property
    def view(self) -> str:
        """The view that the boards of coming cells open on."""
        return self._showing.view

    @view.setter
    def view(self, name: str) -> None:
        require_view(name)
        self._showing.view = name

    @property
    def tracking_uri(self) -> str | None:
        """Where runs go, as passed to `start`; None for the default."""
        return self._showing.tracking_uri

    @property
    def broken(self) -> str | None:
        """Why the whole cluster is unusable, in a sentence; None while it is well."""
        return self._cluster.broken

    @property
    def events(self) -> Path:
        """The file of all that has happened to the cluster, a JSON line an event.

        It holds no code, no values and no messages of errors: it can go with a bug report.
        """
        return self._cluster.events.path

    @property
    def chaos(self) -> Chaos | None:
        """The faults on purpose, running or over; None when there never were any."""
        return self._chaos

    @property
    def is_running(self) -> bool:
        """Whether the session has not been stopped."""
        return self._stopped_at is None

    def run(
        self,
        code: str,
        ranks: str = "all",
        *,
        timeout_s: float | None = None,
        params: Mapping[str, Any] | None = None,
        run_name: str | None = None,
        resume: bool = False,
        track: bool = True,
        show: bool = False,
        prompt: int | None = None,
        retry: int = 0,
        checkpoint: int = 0,
        profile: str | int | None = None,
        go_on: bool = False,
        guard: bool = False,
        keep: bool = False,
        ignore: Sequence[str] = (),
    ) -> CellResult:
        """Run a cell on the ranks and wait until all have settled.

        Args:
            code: What a notebook cell may hold: statements, magics, `!cmd`, top-level await.
            ranks: `all`, `0`, `0,2` or `1-3`.
            timeout_s: Interrupt the cell after so many seconds; None lets it run.
            params: Names set on the ranks before the cell runs, and logged with the run.
            run_name: Name of the MLflow run, should the cell train.
            resume: Continue the newest run of that name.
            track: Whether a training is tracked in MLflow.
            show: Show output, board and errors as `%%distributed` does.
            prompt: The number that tracebacks give the cell, as the notebook's prompt; by
                default the number of cells this session has run.
            retry: Run the cell again after a RankError, so many times at most. A cell that
                fails twice with the same error, without a step, is not tried again.
            checkpoint: Save the training every so many steps, as `nbdist.save()` does. Run again
                after a fault that took what was trained, the cell continues from the newest.
            profile: Steps to record with torch.profiler on these ranks: a count, taken after two
                steps to warm up, or a range such as `10-14`. `Session.profile` is what came of it.
            go_on: This is the cell that failed last, fixed: its loops over loaders continue
                where they were, and so does its MLflow run.
            guard: Leave a step out, on all ranks, where a gradient of any is not finite.
            keep: As `guard`, and keep the newest steps, some 24 to 48, for `replay(step)`; where
                one is left out or the cell fails also on disk, for `replay(saved=...)`: people's
                samples, in `.nbdist/evidence`, for 7 days.
            ignore: Rules that say nothing of this cell, by the names that `checks` lists.

        Returns:
            Output, value and error of each rank.

        Raises:
            CellSyntaxError: The code does not compile; it was not run.
            ClusterError: The session is stopped, busy or has lost a rank.
            RankError: The code failed on a rank.
            UsageError: `ranks` names no ranks, a parameter is not plain or replaces a name that
                ranks need, `resume` names a sweep, or `profile` no steps.
            KeyboardInterrupt: The cell was interrupted; all ranks have settled.
        """
        request = self._request(
            code,
            ranks,
            params,
            profile,
            timeout_s=timeout_s,
            run_name=run_name,
            resume=resume,
            track=track,
            show=show,
            prompt=prompt,
            every=checkpoint,
            guard=guard or keep,
            evidence=self._evidence if keep else "",
            ignore=require_rules(ignore),
        )
        if resume and track and run_name is not None:
            self._showing.require_run(run_name)
        with self._alone():
            return self._attempts.run(request, retry, go_on=go_on)

    def run_script(
        self,
        path: str | os.PathLike[str],
        arguments: Sequence[str] = (),
        ranks: str = "all",
        *,
        run_name: str | None = None,
        track: bool = True,
        show: bool = False,
        prompt: int | None = None,
        timeout_s: float | None = None,
        retry: int = 0,
        checkpoint: int = 0,
        is_module: bool = False,
        guard: bool = False,
        keep: bool = False,
        ignore: Sequence[str] = (),
    ) -> CellResult:
        """Run a script on the ranks as one cell, as torchrun would: an exported one, or any other.

        `__name__` is `"__main__"`, `sys.argv` and `__file__` are the script's, and its names stay
        on the ranks. The group is there: in `init_process_group` ranks only meet, and
        `destroy_process_group` leaves it.

        Args:
            path: The script, on the notebook's machine.
            arguments: The words after it.
            ranks: As in `run`, and so is all that follows.
            run_name: Name of the MLflow run; by default the script's, without its ending.
            track: Whether a training is tracked.
            show: Show output as `%%distributed` does.
            prompt: The number that messages give the cell.
            timeout_s: Interrupt the script after so many seconds.
            retry: Run it again when it fails, so many times at most.
            checkpoint: Save the training every so many steps.
            is_module: `path` is the name of a module, which is run as `python -m` does: relative
                imports work, and modules are found from the folder that holds its package.
            guard: As in `run`, and so are the two that follow.
            keep: Keep on disk what a step that is left out was called with.
            ignore: Rules that say nothing of it.

        Raises:
            UsageError: It cannot be read; else as `run`.
            CellSyntaxError: It does not compile; it was not run.
            RankError: It failed on a rank.
        """
        if not isinstance(path, str | os.PathLike):
            raise UsageError(f"A script is named by its path, not {path!r}.")
        module, file = "", Path(path).expanduser().absolute()
        if is_module:
            module, file = find_module(str(path))
        request = self._request(
            read_script(file),
            ranks,
            None,
            None,
            timeout_s=timeout_s,
            run_name=run_name or (str(path) if is_module else file.stem),
            track=track,
            show=show,
            prompt=prompt,
            every=checkpoint,
            guard=guard or keep,
            evidence=self._evidence if keep else "",
            ignore=require_rules(ignore),
            script=str(file),
            module=module,
            argv=tuple(arguments),
        )
        with self._alone():
            return self._attempts.run(request, retry)

    def sweep(
        self,
        code: str,
        lists: Mapping[str, Sequence[Any]],
        ranks: str = "all",
        *,
        timeout_s: float | None = None,
        params: Mapping[str, Any] | None = None,
        run_name: str | None = None,
        track: bool = True,
        show: bool = False,
        prompt: int | None = None,
        retry: int = 0,
        profile: str | int | None = None,
        guard: bool = False,
        keep: bool = False,
        ignore: Sequence[str] = (),
    ) -> SweepResult:
        """Run a cell once for each value of a list, or for each combination of several lists'.

        In MLflow the runs are nested under one, called `run_name`; each is called by what it tries.

        Args:
            code: The cell.
            lists: What is tried, by the names that are set on the ranks.
            ranks: As in `run`, and so is all that follows; `timeout_s` and `retry` of each run.
            timeout_s: Interrupt a run after so many seconds.
            params: Names that all runs share.
            run_name: Name of the run that holds them; by default what varies.
            track: Whether trainings are tracked in MLflow.
            show: Show outputs as `%%distributed` does.
            prompt: The number that tracebacks give the cell.
            retry: Run again what failed, so many times at most.
            profile: Steps of each run to record.
            guard: Leave a step out where a gradient of any rank is not finite.
            keep: As in `run`: of each run in a folder of its own.
            ignore: Rules that say nothing of the runs.

        Returns:
            One result a run; printed, their table.

        Raises:
            UsageError: A list is empty, or there are too many runs; else as `run`, for the run that
                ended the sweep. The runs before it are kept.
        """
        combinations(lists)  # too many are refused before anything else happens
        request = self._request(
            code,
            ranks,
            params,
            profile,
            lists,
            timeout_s=timeout_s,
            run_name=run_name,
            track=track,
            show=show,
            prompt=prompt,
            guard=guard or keep,
            evidence=self._evidence if keep else "",
            ignore=require_rules(ignore),
        )
        with self._alone():
            return sweep(self._attempts, self._showing, request, lists, retry)

    def _request(
        self,
        code: str,
        ranks: str,
        params: Mapping[str, Any] | None,
        profile: str | int | None,
        lists: Mapping[str, Sequence[Any]] | None = None,
        **more: Any,
    ) -> CellRequest:
        """Return a cell as it was asked for, checked before it reaches a rank; raises as `run`."""
        self._require_usable()
        chosen = parse_ranks(ranks, self.world_size)
        require_params(params or {})
        require_params(lists or {})
        check_syntax(code)
        timeout_s = more.get("timeout_s")
        if not (timeout_s is None or (is_number(timeout_s) and timeout_s > 0)):
            raise UsageError(f"timeout_s is a number of seconds above 0, not {timeout_s!r}.")
        if more.get("resume") and not more.get("run_name"):
            raise UsageError(
                "--resume continues a run by its name, and no name was given.",
                do="%%distributed --run NAME --resume",
            )
        steps = None if profile is None else parse_steps(str(profile))
        if not is_whole(every := more.get("every", 0)):
            raise UsageError(f"checkpoint is a number of steps, 0 for never, not {every!r}.")
        if every and len(chosen) < self.world_size:
            raise UsageError(
                "--checkpoint saves what all ranks train together, and this cell runs on some.",
                do="leave out -r, or leave out --checkpoint",
            )
        folder = str(self._showing.checkpoints)
        self._note_sent(code, {}, ranks)
        return CellRequest(
            code, chosen, params=params or {}, profile=steps, checkpoints=folder, **more
        )

    @property
    def _evidence(self) -> str:
        return str(self._showing.folder.absolute() / "evidence")

    def retry(self) -> CellResult:
        """Run the cell again that failed or was interrupted last, as it was asked for.

        Dead ranks are replaced first, loaders continue where they were, and so does its MLflow run.

        Raises:
            ClusterError: There is none, or what a dead rank held is lost; else as `run`.
        """
        self._require_usable()
        with self._alone():
            return self._attempts.retry()

    def verify(self, handle: str | None = None) -> str:
        """Prove a layout against one process, with what its `step` was last called with.

        Args:
            handle: Name of a layout, or of its model, on the ranks; None takes the newest.

        Returns:
            The proof as text, its verdict in the first line.

        Raises:
            LayoutError: It cannot be proven; the text says why. A difference is no error.
        """
        return self.prove(handle)[1]

    def prove(self, handle: str | None = None) -> tuple[bool, str]:
        """Return whether a layout computes what one process does, and the proof as text.

        Raises:
            LayoutError: As `verify`.
        """
        if handle is not None and not handle.isidentifier():
            raise UsageError(f"{handle!r} is no name of a layout or a model.")
        answer = self._of_layout("layout.verify", handle=handle)
        return answer["ok"], answer["text"]

    def replay(
        self,
        step: int | None = None,
        *,
        fp32: bool = False,
        anomaly: bool = False,
        saved: str | os.PathLike[str] | None = None,
        rank: int | None = None,
        one: bool = False,
    ) -> Replayed:
        """Look into a step that was left out, or is of a cell with `keep`; changes nothing.

        Its forward runs again on all ranks that have made it, with its batch, the random
        numbers and, where they fit into memory, the weights that it began with: of a step that
        was not left out they come from the steps before it, which are made again.

        Args:
            step: Its number in the cell; None takes the newest that was left out, or else the
                newest.
            fp32: Run it in float32, too: weights, buffers and inputs cast, autocast off.
            anomaly: Run its loss and backward, too, where `layout.step` has made the loss: which
                operation gives the first gradient that is not finite, of which module and line.
            saved: A folder that a cell with `keep` has named, or its name in `.nbdist/evidence`, or
                "last": the step is taken from there, for a model that was built again.
            rank: Return what this one finds alone; others take part where it needs them.
            one: Run the forward in one process, too, on the plain model of a layout: is it the
                model and the data, or the layout?

        Returns:
            Which gradients are not finite by rank and module, the first module whose output is
            not, and for which samples; printed, in sentences.

        Raises:
            UsageError: No such step is kept, the text says which are; or weights are spread in a
                way in which they cannot be float32. What is saved lacks a rank, or is of another
                model. There is no plain model to run it in one process.
        """
        if rank is not None and not is_whole(rank):
            raise UsageError(f"rank is the number of a rank, not {rank!r}.")
        if step is not None and not is_whole(step):
            raise UsageError(f"step is the number of a step, not {step!r}.")
        if saved == "" or not isinstance(saved, str | os.PathLike | None):
            raise UsageError(f'saved is a folder with evidence, or "last", not {saved!r}.')
        place = os.path.expanduser("" if saved is None else saved)
        if place:  # a name lies beside the others; what has a folder before it, in this one
            is_path = os.path.dirname(place)
            place = os.path.abspath(place if is_path else os.path.join(self._evidence, place))
        asked = {"step": step, "fp32": fp32, "anomaly": anomaly, "rank": rank, "one": one}
        return Replayed.of(self._ask("checks.replay", saved=place, **asked), rank)

    def diff(self, one: str, other: str) -> LayoutDiff:
        """Find where two layouts of the newest model part; changes nothing.

        Each is made of the model as it was before `parallelize`, with the weights of now, and takes
        one step on the batch of the newest `layout.step`: what every module returns, the loss and
        the gradients are compared with one process on the same parts. The room of another model is
        needed meanwhile.

        Args:
            one: A layout, as `parallelize` takes it.
            other: Another.

        Returns:
            The first place at which each parts from one process; printed, in sentences.

        Raises:
            LayoutError: There is no model with a layout, or one of the two does not fit it.
        """
        return LayoutDiff.of(self._of_layout("layout.compare", one=one, other=other))

    def explained_bytes(self) -> tuple[str, float]:
        """Return the newest layout's name, and the bytes a rank sends a step as it explains them.

        Raises:
            LayoutError: There is no layout, or what it sends depends on a batch that is unknown.
        """
        answer = self._of_layout("layout.traffic")
        return answer["name"], answer["bytes"]

    def _of_layout(self, call: str, **arguments: Any) -> dict[str, Any]:
        """Return what the ranks answer about a layout; raises LayoutError as they say it."""
        answer: dict[str, Any] = self._ask(call, **arguments)[0]
        if "error" in answer:
            what, why, do = answer["error"]
            raise LayoutError(what, why=why, do=do)
        return answer

    def _ask(self, call: str, **arguments: Any) -> dict[int, Any]:
        """Return what each rank answers to a call that all of them take part in."""
        self._require_usable()
        everyone = tuple(range(self.world_size))
        with self._alone():
            found = self._attempts.call(call, everyone, **arguments)
        return {rank: found[rank].value for rank in everyone}

    def expect(self, assertion: str) -> str:
        """Check what is said of the newest training, as `%dist expect` does.

        Args:
            assertion: Such as `loss < 0.3`, `parity`, `collectives == last`, `bytes 1 %`,
                `no alarms`, `step <= 1.1 x baseline`.

        Returns:
            A line that says what was found.

        Raises:
            ExpectationError: It does not hold.
            UsageError: It is no assertion; the text says what is right.
            ClusterError: Nothing has trained yet.
        """
        return self._judge(self, assertion)

    @property
    def trained(self) -> TrainedCell | None:
        """The newest cell that has trained, and is over; None before the first."""
        return self._showing.trained

    def judge_by(self, judge: "Callable[[Session, str], str]") -> None:
        """Let `expect` answer by this function of a layer above."""
        self._judge = judge

    def note_sent(self, note: "Callable[[str, Mapping[str, Any], str], None]") -> None:
        """Let `note` hear what ranks are sent from here on: code, or values, and which ranks."""
        self._note_sent = note

    def note_trained(self, note: Callable[[Mapping[int, float], Sequence[Change]], None]) -> None:
        """Let `note` hear of each training from here on: first losses by rank, and changes."""
        self._showing.note_trained = note

    def probe(self) -> LinkProbe:
        """Measure links between the ranks, and how fast they compute; nothing else may run.

        Returns:
            A link for each pair of ranks; of many ranks, one for each pair of hosts. Printed with
            a verdict: of kinds of links, all_reduces, computing, and of the newest training.
        """
        rates = self.compute_rates()
        hosts = {rank: state.host for rank, state in self._cluster.ranks.items()}
        pairs = choose_pairs(hosts)
        data, traffic = of_newest(self.trained, len(hosts))
        if len(hosts) == 1:
            return LinkProbe((), None, rates, data)
        measured = self._ask("group.probe", pairs=both_ways(pairs))
        return LinkProbe(
            links(pairs, hosts, {rank: of_rank["pairs"] for rank, of_rank in measured.items()}),
            fit([(size, seconds) for size, seconds in measured[min(hosts)]["all_reduce"]]),
            rates,
            data,
            traffic,
            "nccl" if "nccl" in self.options.backend else "gloo",
        )

    def compute_rates(self) -> dict[int, dict[str, float]]:
        """Return the floating-point operations a second of each rank, by dtype; half a second.

        They are those of large matmuls, all ranks at once: the most that a training can compute.
        """
        return self._ask("training.compute_rate")

    def push(self, values: Mapping[str, Any], ranks: str = "all") -> None:
        """Set names on the ranks to these values. Arrays and tensors travel as raw buffers.

        Raises:
            TransferError: A value cannot be pickled; nothing was set.
            UsageError: No dict, or a key of it is no name.
        """
        push(self._cluster, values, self._ready_ranks(ranks))
        self._note_sent("", values, ranks)

    def pull(self, name: str, ranks: str = "all") -> list[Any]:
        """Return the value of a name, one entry per rank; tensors arrive on the CPU.

        Raises:
            TransferError: A rank has no such name, or its value cannot be pickled.
        """
        return pull(self._cluster, name, self._ready_ranks(ranks, saving=True))

    def status(self) -> Status:
        """Return what every rank is doing now; answered also while a cell runs."""
        if not self.is_running:
            return Status.stopped(self._stopped_text())
        return Status.ask(self._cluster, self.describe)

    @property
    def cost(self) -> Cost:
        """The cost of watching, now or in the newest cell that trained. Any thread."""
        self._require_running()
        return self._showing.cost_meter.cost(self._cluster)

    def stacks(self, ranks: str = "all") -> Stacks:
        """Return what these ranks do and each thread's stack; answered also while a cell runs."""
        self._require_running()
        return Stacks.ask(self._cluster, parse_ranks(ranks, self.world_size))

    def pause(self, timeout_s: float = TIMEOUT_S) -> Paused:
        """Let the training of the running cell stand still, all ranks after the same step.

        `peek` and `change` work there, at once. An interrupt ends the cell as ever; a rank that
        dies meanwhile ends the pause. A cell's `timeout_s` counts on. Any thread.

        Args:
            timeout_s: How long to wait until all ranks have come to the end of one step.

        Raises:
            ClusterError: No cell runs, or they did not come there: then all go on.
        """
        self._require_running()
        return self._showing.halts_of(self._cluster).pause(timeout_s)

    def resume(self) -> str:
        """Let a training go on that was paused; returns a sentence. Any thread.

        Raises:
            ClusterError: None is paused.
        """
        self._require_running()
        return self._showing.halts_of(self._cluster).resume()

    def peek(self, expression: str, timeout_s: float = TIMEOUT_S) -> Peeked:
        """Evaluate an expression on all ranks after the same step of the running cell.

        It has the names of cells, as a line after `optimizer.step()` at their top level, and no
        gradients. It may run collectives. Random generators are put back afterwards; what else it
        changes stays so. What it raises is in `errors`, and the training goes on. Any thread.

        Args:
            expression: Such as `model.layer3.weight.norm()`.
            timeout_s: How long to wait for the end of a step; then the expression takes its time.

        Raises:
            ClusterError: As `pause`, or a rank ended the cell meanwhile.
            UsageError: It is no expression.
        """
        self._require_running()
        return self._showing.halts_of(self._cluster).peek(expression, timeout_s)

    def change(self, *, timeout_s: float = TIMEOUT_S, **values: Any) -> Changed:
        """Set values on all ranks after the same step of the running cell, or on none.

        `lr` is that of all groups of the optimizers that have stepped in the cell; other names are
        those of its `params`. The run, its board and an exported script tell of it. A retry of the
        cell begins with the new parameters. Any thread.

            session.change(lr=0.01)

        Args:
            timeout_s: As `pause`.
            values: By name.

        Raises:
            ClusterError: As `pause`.
            UsageError: A name is none of these, or its value is not plain.
        """
        self._require_running()
        return self._showing.halts_of(self._cluster).change(values, timeout_s)

    def start_chaos(self, plan: ChaosPlan) -> Chaos:
        """Make ranks fail on purpose while cells run, instead of by the plan before.

        Returns:
            The schedule; printed, it shows the outcome so far.
        """
        self._require_running()
        self.stop_chaos()
        self._chaos = Chaos(self._cluster, plan)
        self._chaos.start()
        return self._chaos

    def stop_chaos(self) -> Chaos | None:
        """End the faults on purpose; returns what has struck, None when nothing ever was."""
        if self._chaos is not None:
            self._chaos.stop()
        return self._chaos

    def show_board(self, view: str | None = None, *, run: str | None = None) -> None:
        """Display the board of the last cell that trained, or of a run.

        Args:
            view: Which of its views: overview, loss, step, collectives, ranks or verdicts. None
                shows the one that boards open on.
            run: A run of this notebook, of any day: its name, or its number in `%dist runs`.

        Raises:
            ClusterError: No cell has trained yet.
            UsageError: There is no such view or run.
        """
        if view is not None:
            require_view(view)
        self._showing.show_board(view, run)

    def animate(self, what: str = "pipeline") -> "Animation":
        """Return a moving picture of the training that runs, or of the last one.

        Args:
            what: "pipeline" is one step with pp: which stage ran which micro-batch when, as the
                ranks measured it, the newest of the first two and of those whose number is a power
                of two. "ring" is the largest all_reduce of recent steps: its bytes and time are
                measured, the order of its rounds is the algorithm's. "shards" is a recent step of
                FSDP2 (zero2, zero3): which parameters a rank gathered and freed, and whose
                gradients it reduced when.

        Returns:
            What a notebook shows as a picture; its text says the same.

        Raises:
            ClusterError: No cell has trained yet, or there was none of these.
            UsageError: There is no such picture.
        """
        require_word("what", what, ANIMATIONS)
        return self._showing.board().animation(what)

    def board(self) -> Past:
        """Return the board of the cell that trains, or has trained last. Any thread.

        Raises:
            ClusterError: No cell has trained yet.
        """
        return self._showing.board()

    def restart(self, ranks: str = "all") -> tuple[str, ...]:
        """Give these ranks new processes; the other ranks keep what they hold.

        A new process gets what the living ranks hold, where some live on; dead ranks are replaced
        too. After the controller or the store has ended, all ranks are started again.

        Returns:
            What was done beside, in sentences.

        Raises:
            ClusterError: A cell runs, or all ranks must be replaced.
            StartError: A process did not come up.
        """
        self._require_running()
        chosen = parse_ranks(ranks, self.world_size)
        if self._cluster.broken and len(chosen) < self.world_size:
            raise self._cluster.broken_error()
        with self._alone():
            try:
                with Interrupts():
                    return restart(self._cluster, chosen).lines
            except BaseException:
                if not self._cluster.is_up:
                    self.stop()
                raise

    def scale(self, n: int) -> tuple[str, ...]:
        """Continue with `n` ranks; those that remain keep what they hold, new ones get the same.

        Models that `parallelize` has spread with dp alone keep training on the new number; groups,
        meshes and other wrappers must be re-created, and raise when they are used.

        Returns:
            What was done, in sentences.

        Raises:
            ClusterError: A cell runs.
            StartError: New ranks did not come up; the others work on.
            UsageError: `n` is no number of ranks.
        """
        if not is_whole(n, 1):
            raise UsageError(f"A cluster has at least 1 rank, not {n!r}.")
        self._require_usable()
        with self._alone(), Interrupts():
            return scale(self._cluster, n)

    def stop(self) -> None:
        """End all ranks; what they held is gone. A second call does nothing."""
        if self._stopped_at is None:
            self._stopped_at = time.time()
            with Interrupts() as counted:  # stopped by half, ranks would stay for good
                for end in self._at_stop:
                    end()
                self.unreached = tuple(self._cluster.stop())
            atexit.unregister(self.stop)
            atexit.unregister(self.leave)
            if counted.count:
                raise Interrupted("All ranks have ended.")

    @property
    def detached(self) -> str | None:
        """The name by which other kernels attach to the cluster; None where it ends with this."""
        return None if self._cluster.memory is None else self._cluster.memory.name

    def detach(self, name: str, folder: str) -> None:
        """Let the cluster outlive this kernel, by that name.

        Args:
            name: See `nbdist.shared.processes.detached.name_for`.
            folder: The notebook's, by which a person knows it.

        Raises:
            StartError: The name is taken meanwhile, or its keeper cannot be found by it.
        """
        self._cluster.detach(name, {"folder": folder})
        self._remember()

    def go_on(self, name: str, memory: Mapping[str, Any], tell: Callable[[Any, str], None]) -> None:
        """Continue where another kernel has left, after `Cluster.adopt`; see `finish_cell`.

        Args:
            name: The cluster's.
            memory: What that kernel has left.
            tell: Takes what this one leaves.
        """
        self._attempts.begin_at(memory["cells"])
        self._left = memory["cell"]
        self._cluster.remember_in(ClusterMemory(name, self._cluster.facts, tell))
        assert self._cluster.memory is not None
        self._cluster.memory.cells = memory["cells"]
        self._remember()

    def _remember(self) -> None:
        assert self._cluster.memory is not None
        self._cluster.memory.session = self._showing.memory()
        self._cluster.memory.changed()

    def finish_cell(self) -> CellResult | str:
        """Wait for the cell that another kernel has left running, and show it as that would have.

        Returns:
            What it gave; where none was left, what was repaired, in sentences.

        Raises:
            RankError, ClusterError, KeyboardInterrupt: As `run`.
        """
        with self._alone():
            left, self._left = self._left, None
            return self._attempts.replace_dead() if left is None else self._attempts.go_on(left)

    def leave(self) -> None:
        """Let go of a detached cluster, which runs on; the session is over."""
        if self._stopped_at is None:
            self._stopped_at = time.time()
            self.stop_chaos()
            for end in self._at_stop:
                end()
            self._cluster.leave()
            atexit.unregister(self.leave)

    def interrupt_and_stop(self) -> None:
        """Interrupt what runs on the ranks, wait until it has settled, and stop.

        For other threads than the one that waits for the cell, which gets its KeyboardInterrupt.

        Raises:
            ClusterError: It did not settle; the ranks run on.
        """
        asked = 0
        while not self._busy.acquire(timeout=_SETTLE_TIMEOUT_S if asked else 0.0):
            if asked == _STOP_INTERRUPTS:
                raise ClusterError(
                    "The cell did not end, so the ranks were not stopped.",
                    why=f"it was interrupted {asked} times.",
                    do="restart the notebook's kernel: its ranks end with it.",
                )
            interrupts.here.interrupt_to_stop()
            asked += 1
        try:
            self.stop()
        finally:
            self._busy.release()

    def at_stop(self, end: Callable[[], None]) -> None:
        """Call `end` when the session stops; it must not raise."""
        self._at_stop.append(end)

    def __enter__(self) -> "Session":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<nbdist session: {self.describe if self.is_running else self._stopped_text()}>"

    def _require_running(self) -> None:
        if not self.is_running:
            raise ClusterError(
                "No ranks are running, so nothing was run.",
                why=self._stopped_text(),
                do="%dist start, then run the cell again.",
            )

    def _require_usable(self, *, saving: bool = False) -> None:
        self._require_running()
        if self._cluster.broken and not (saving and self._cluster.reachable):
            raise self._cluster.broken_error()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Refuse what would run beside a cell."""
        if not self._busy.acquire(blocking=False):
            raise ClusterError(
                "A cell is still running on the ranks.", do="wait for it, or interrupt the kernel."
            )
        before = self.world_size
        try:
            yield
        finally:
            if self.world_size != before:  # by %dist scale, or where a host was lost
                self.describe = str(self._cluster.options)
            self._busy.release()

    def _stopped_text(self) -> str:
        at = time.strftime("%H:%M", time.localtime(self._stopped_at))
        return f"the cluster was stopped at {at}."

    def _ready_ranks(self, ranks: str, *, saving: bool = False) -> tuple[int, ...]:
        """Return the ranks to use, or raise one error that says what to do.

        Args:
            ranks: As in `run`.
            saving: What ranks hold is to be saved, which a broken cluster allows if it can.
        """
        self._require_usable(saving=saving)
        chosen = parse_ranks(ranks, self.world_size)
        dead = sorted(set(self._cluster.dead()) & set(chosen))
        if dead:
            causes = {str(self._cluster.ranks[r].ended) for r in dead}
            raise ClusterError(
                f"{begin_with_ranks(dead, be=True)} not running any more, so nothing was run.",
                why=f"{', '.join(sorted(causes))}. The other ranks keep their variables.",
                do=f"%dist restart -r {','.join(map(str, dead))}",
            )
        return chosen
