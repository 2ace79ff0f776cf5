"""This rank: its kernel, its output, its records and its components, from cell to cell.

`boot` makes it, in a process that has become a rank. Main thread; ipykernel's control thread
answers requests marked busy (`engine/kernel/ipython/calls.py`).
"""

import faulthandler
import logging
import os
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nbdist.engine.kernel import cleanup, environment, location
from nbdist.engine.kernel.ipython import calls, kernel, shell
from nbdist.engine.kernel.output.stdio import Output
from nbdist.engine.kernel.output.stdio_files import LogStream
from nbdist.engine.kernel.records import Recorder
from nbdist.shared import plain, wire
from nbdist.shared.error_text import named
from nbdist.shared.options import ClusterOptions
from nbdist.shared.placement import HERE, RankPlacement

if TYPE_CHECKING:
    from nbdist.engine.compat.groups.torch_dist import Functions
    from nbdist.engine.component import Component

log = logging.getLogger(__name__)


class Rank:
    """The rank beside the user's code. One per process; see `this_rank`."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.rank: int = spec["rank"]
        self.options = ClusterOptions(**spec["options"])
        self.place = RankPlacement(**spec["place"])
        self.device = torch.device(self.options.device)
        self.variables: dict[str, str] = {}
        self.joined = False
        self._spec = spec
        self.logs: str = spec["output_folder"]
        # As for scp, where the notebook does not see the file.
        self._logs_on = f"{spec['logs_on']}:" if "logs_on" in spec else ""
        self.torchs: Functions | None = None
        self.tracks = True  # the cell that runs, or ran last
        self.published: list[dict[str, Any]] = []  # by that cell
        self._began = 0.0
        self.first_seq = 0
        self.components: tuple[Component, ...] = ()  # until it has joined
        self._number = 0  # of the cell that runs, or ran last

    def keep_with_peers(self) -> None:
        """Begin to keep snapshots in a peer's memory, if that is enabled."""
        from nbdist.engine.group import state
        from nbdist.engine.recovery.snapshots import peers

        peers.here.start(
            self.rank,
            self.place.peer,
            every=self.options.peer_snapshots,
            host=self.place.address,
            key=self.kernel.session.key,
            client=state.here.member().client,
        )

    # -- called by the kernel (engine/kernel/ipython/kernel.py)

    def installed(self, rank_kernel: kernel.RankKernel) -> None:
        """Take over the output, and put the names of cells in place."""
        from nbdist.engine.rank import script

        if self.place.host != HERE:
            environment.leave_to_parent()
        self.kernel = rank_kernel
        self.recorder = Recorder(self.rank, self._publish_records)
        self.output = Output(self.rank, Path(self._spec["output_folder"]), self._publish_output)
        self.output.install()
        if (here := os.getcwd()) != os.path.realpath(wanted := self._spec["work_folders"][0]):
            gone = "is gone" if self.place.host == HERE else f"is not on {self.place.host}"
            print(f"{wanted} {gone}: rank {self.rank} works in {here}.")
        # Into the file behind descriptor 2, where the notebook reads the last words of a dead rank.
        faulthandler.enable(2, all_threads=False)
        engine_log = LogStream(self.output.original(2))
        kernel.log_to(rank_kernel.log, engine_log)
        _log_to(engine_log)
        self.script = script.Script(rank_kernel.shell, script.ReadFiles())
        shell.install(rank_kernel, self.output.flush, self.output.lent, _was_freed)

    def cell_began(self, start: wire.CellStart) -> None:
        """Prepare for a cell: its output, its records, the parameters of `-p`, its components."""
        from nbdist.engine.checks import model_facts
        from nbdist.engine.rank import components

        self._began = time.perf_counter()
        self.output.put_back()
        self.output.begin_cell(start.number)
        self.tracks = start.track
        self.published.clear()
        of_cell = (wire.PUBLISHED, wire.CHANGES, wire.CONTINUES, wire.TRAINED_BEFORE, wire.NUMERICS)
        self.recorder.forget(*of_cell, *model_facts.FACTS)
        self.first_seq = self.recorder.begin_cell()
        self.kernel.shell.user_ns.update(
            {name: plain.decode(value) for name, value in start.params.items()}
        )
        location.here.script = start.script.file if start.script else None
        components.begin(self.components, start)
        location.here.running = self._number = start.number

    def cell_ended(self, result: Any) -> wire.CellEnd:
        """Flush the cell's output, restore the environment, and summarize the cell."""
        from nbdist.engine.component import EndedCell
        from nbdist.engine.data.position import resume
        from nbdist.engine.rank import components
        from nbdist.engine.tap import tap
        from nbdist.engine.training import training

        source = str(result.info.raw_cell) if result is not None else ""
        cell = EndedCell(self._number, source, result is not None and bool(result.success))
        self.output.put_back()  # what follows may print, or open descriptors
        notices = tuple(components.end(self.components, cell))
        environment.restore(self.variables)
        cut_bytes, file = self.output.end_cell()
        value = getattr(result, "result", None)
        is_plain = plain.is_plain(value)
        end = wire.CellEnd(
            first_seq=self.first_seq,
            next_seq=self.recorder.flush(),
            collectives=tap.counts() if self.joined else {},
            sent=tap.sent(),
            received=tap.received(),
            steps=training.here.current_step(),
            value=plain.encode(value) if is_plain else None,
            value_repr=None if is_plain else _short_repr(value),
            notices=notices,
            cut_bytes=cut_bytes,
            output_file=None if file is None else f"{self._logs_on}{file}",
            seconds=time.perf_counter() - self._began,
            in_loops=resume.here.are_loops_begun(),
            in_group=not self.joined or torch.distributed.is_initialized(),
        )
        location.here.running = location.here.script = None
        cleanup.release_frames(getattr(result, "error_in_exec", None))
        return end

    def answer(
        self, content: dict[str, Any], buffers: list[memoryview], *, busy: bool
    ) -> kernel.Answer:
        """Carry out one request of the notebook; an error becomes text in the reply."""
        try:
            function = calls.resolve(content["call"], busy=busy)
            if content["call"] in calls.WITH_BUFFERS:
                value, out = function(buffers, **content["kwargs"])
                return {"value": value}, out
            return {"value": function(**content["kwargs"])}, []
        except BaseException as error:
            # Also KeyboardInterrupt: a request that an interrupt hit still needs its reply.
            log.warning("request %s failed\n%s", content.get("call"), traceback.format_exc())
            return {"error": named(error)}, []

    # -- messages to the notebook

    def _publish_records(self, batch: dict[str, Any]) -> None:
        self.kernel.publish(wire.RECORDS, batch)

    def _publish_output(self, content: dict[str, Any]) -> None:
        self.kernel.publish(wire.OUTPUT, content)


_rank: Rank | None = None


def become(spec: dict[str, Any]) -> Rank:
    """Make this process a rank. Once a process."""
    global _rank
    _rank = Rank(spec)
    return _rank


def this_rank() -> Rank:
    """Return this process's rank.

    Raises:
        RuntimeError: This process is not a rank.
    """
    if _rank is None:
        raise RuntimeError("This process is not a rank of an nbdist cluster.")
    return _rank


def _log_to(stream: LogStream) -> None:
    """Send what nbdist logs to `stream`: what prints in a cell is the user's own."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    ours = logging.getLogger("nbdist")
    ours.addHandler(handler)
    ours.propagate = False


def _was_freed(error: BaseException) -> bool:
    from nbdist.engine.group import group

    return group.was_released(error)


def _short_repr(value: object, limit: int = 4096) -> str:
    try:
        text = repr(value)
    except Exception as error:
        return f"<{type(value).__name__}, whose repr raised {type(error).__name__}>"
    return text if len(text) <= limit else text[:limit] + "…"
