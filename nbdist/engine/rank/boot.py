"""Become rank r: from a bare process to an engine whose cells can train.

`run` is called once, in a process forked from the warmed parent (or a fresh interpreter). It
sets the environment, then serves as an ipyparallel engine until it is told to stop or the
notebook's kernel ends. `join` is called over the wire, when all engines are there, and forms
the process group.

Threads: `run` and `join` on the main thread; ipykernel's control thread answers requests
marked busy (`engine/kernel/calls.py`).
"""

import contextlib
import faulthandler
import logging
import os
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import nbdist
from nbdist.engine.kernel import (
    calls,
    cleanup,
    environment,
    fd_reserve,
    kernel,
    location,
    shell,
    termination,
    tqdm_bars,
)
from nbdist.engine.kernel.records import Recorder
from nbdist.engine.kernel.stdio import Output
from nbdist.engine.kernel.stdio_files import LogStream
from nbdist.shared import lifeline, plain, side, wire
from nbdist.shared.error_text import named
from nbdist.shared.options import ClusterOptions
from nbdist.shared.placement import HERE, Place
from nbdist.shared.text import name_ranks

if TYPE_CHECKING:
    from nbdist.engine.compat.torch_dist import Functions
    from nbdist.engine.component import Component

log = logging.getLogger(__name__)


class Program:
    """What runs on this rank beside the user's code. One a process; see `program`."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.rank: int = spec["rank"]
        self.options = ClusterOptions(**spec["options"])
        self.place = Place(**spec["place"])
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
        """Begin to keep snapshots in a peer's memory, where that is asked for."""
        from nbdist.engine.group import state
        from nbdist.engine.recovery import peers

        peers.here.start(
            self.rank,
            self.place.peer,
            every=self.options.peer_snapshots,
            host=self.place.address,
            key=self.kernel.session.key,
            client=state.here.member().client,
        )

    # -- called by the kernel (engine/kernel/kernel.py)

    def installed(self, rank_kernel: kernel.RankKernel) -> None:
        """Take over what is printed, and put the names in place that cells find."""
        from nbdist.engine.rank import script

        if self.place.host != HERE:
            termination.leave_to_parent()
        self.kernel = rank_kernel
        self.recorder = Recorder(self.rank, self._publish_records)
        self.output = Output(self.rank, Path(self._spec["output_folder"]), self._publish_output)
        self.output.install()
        if (here := os.getcwd()) != os.path.realpath(wanted := self._spec["work_folders"][0]):
            gone = "is gone" if self.place.host == HERE else f"is not on {self.place.host}"
            print(f"{wanted} {gone}: rank {self.rank} works in {here}.")
        # Into the file behind descriptor 2: the notebook tells a dead rank's last words from it.
        faulthandler.enable(2, all_threads=False)
        engine_log = LogStream(self.output.original(2))
        kernel.log_to(rank_kernel.log, engine_log)
        _log_to(engine_log)
        self.script = script.Script(rank_kernel.shell, script.ReadFiles())
        shell.install(rank_kernel, self.output.flush, self.output.lent, _was_freed)

    def cell_began(self, start: wire.CellStart) -> None:
        """Prepare for a cell: its output, its records, the parameters of `-p`, its components."""
        from nbdist.engine.checks import model_facts
        from nbdist.engine.rank import components, register

        self._began = time.perf_counter()
        self.output.put_back()
        self.output.begin_cell(start.number)
        self.tracks = start.track
        self.published.clear()
        self.recorder.forget(wire.PUBLISHED, wire.GOES_ON, *model_facts.FACTS)
        self.first_seq = self.recorder.begin_cell()
        self.kernel.shell.user_ns.update(
            {name: plain.decode(value) for name, value in start.params.items()}
        )
        location.here.script = start.script.file if start.script else None
        components.begin(self.components, start)
        location.here.running = self._number = start.number
        register.tell_going_on(self.recorder)  # before the cell logs anything

    def cell_ended(self, result: Any) -> wire.CellEnd:
        """Flush what the cell made, put the environment back, and sum the cell up."""
        from nbdist.engine.component import EndedCell
        from nbdist.engine.data import resume
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


_program: Program | None = None


def program() -> Program:
    """Return this process's program.

    Raises:
        RuntimeError: This process is not a rank.
    """
    if _program is None:
        raise RuntimeError("This process is not a rank of an nbdist cluster.")
    return _program


def run(spec: dict[str, Any]) -> None:
    """Serve as an engine; returns when it has been told to stop. Called once a process."""
    global _program
    lifeline.watch(spec["kernel_pid"], lifeline.end_own_session)
    side.settle("rank")
    _go_to_work(spec["work_folders"])
    _program = Program(spec)
    options = _program.options
    _program.variables = environment.rank_variables(spec["rank"], options, _program.place)
    environment.restore(_program.variables)
    environment.refuse_more_ranks()
    environment.refuse_second_rpc()
    torch.set_num_threads(options.threads)
    environment.seed_anew(spec["rank"])
    tqdm_bars.install()
    kernel.serve(
        _program,
        [
            f"--file={spec['connection_file']}",
            f"--profile-dir={spec['profile_dir']}",
            # By default the folder in which ipyparallel was imported: in a fork, that was earlier.
            f"--work-dir={os.getcwd()}",
            f"--IPEngine.id={spec['rank']}",
            "--IPEngine.enable_nanny=False",
            "--IPEngine.timeout=60",
            # The lifeline replaces it, and works while the main thread is busy.
            "--IPEngine.max_heartbeat_misses=0",
            "--log-level=30",
        ],
    )


def answer() -> None:
    """Say, by returning, that calls reach this rank."""


def join(
    *,
    version: int,
    options: dict[str, Any],
    place: dict[str, Any],
    store_port: int,
    generation: int,
    newcomers: list[int],
    first_group: int,
) -> dict[str, Any]:
    """Form the process group with the other ranks; again after `resize.leave`. Main thread.

    Args:
        version: Of the notebook's messages.
        options: The fields of `ClusterOptions`.
        place: The fields of this rank's `Place`.
        store_port: Where the store listens, at the cluster's address.
        generation: 0 in a new cluster.
        newcomers: Ranks that take the place of others, this one among them; empty in a new
            cluster. The survivors run `recover` at the same time, or `join` as well after `leave`.
        first_group: The number of the default group, see `group.join`.

    Returns:
        This rank's number and device; for a new rank also what `recover` tells of it.

    Raises:
        RuntimeError: The notebook runs another version of nbdist.
    """
    from nbdist.engine.compat import torch_dist
    from nbdist.engine.data import account
    from nbdist.engine.group import group
    from nbdist.engine.rank import standalone
    from nbdist.engine.rank.register import connect
    from nbdist.engine.recovery import recovery, resize

    if version != wire.VERSION:
        raise RuntimeError(
            f"the notebook speaks version {version} of nbdist's messages, this rank "
            f"{wire.VERSION}: install the same nbdist on both"
        )
    here = program()
    here.options, here.place = asked, place_ = ClusterOptions(**options), Place(**place)
    if asked.device == "cuda":
        torch.cuda.init()  # what it raises says why a GPU cannot be used
    if here.torchs is not None:
        here.torchs.put_back()
    device = group.join(
        here.rank, asked, place_, store_port, generation=generation, first_group=first_group
    )
    here.torchs = torch_dist.Functions()  # with `init_process_group` of this group
    here.joined = True
    here.keep_with_peers()
    here.variables.update(environment.rank_variables(here.rank, asked, place_))
    here.variables.update(environment.group_variables(asked.address, store_port))
    environment.restore(here.variables)
    account.here.keep_in(
        Path(here.logs),
        str(store_port),
        here.rank,
        asked.n,
        is_first=not generation and not newcomers,
    )
    connect(here, device)
    local_rank = int(here.variables["LOCAL_RANK"])
    standalone.here.rank = standalone.ThisRank(here.rank, local_rank, asked.n, device)
    here.recorder.fact(torch=torch.__version__)
    here.kernel.shell.user_ns.update(
        rank=here.rank,
        local_rank=local_rank,
        world_size=asked.n,
        device=device,
        torch=torch,
        dist=torch.distributed,
        nbdist=nbdist,
    )
    resize.follow()
    fd_reserve.here.fill()
    answer = {"rank": here.rank, "device": str(device)}
    return {**answer, **recovery.settle(generation, newcomers)} if newcomers else answer


def recover(
    generation: int, newcomers: list[int], peers: list[tuple[int, int | None]]
) -> dict[str, Any]:
    """Put all ranks together again after a fault; see `recovery`. All ranks, main thread.

    `peers` are pairs of a rank and the one in whose memory it keeps its snapshots: a rank that
    lives keeps its place, but others may have moved to its host.
    """
    from nbdist.engine.checkpoint import save
    from nbdist.engine.recovery import recovery

    if newcomers:
        save.here.give_up(f"{name_ranks(newcomers)} died")
    fd_reserve.here.release()
    if (torchs := program().torchs) is not None:
        torchs.put_back()  # what a cell that went well has replaced
    try:
        return recovery.recover(generation, newcomers, dict(peers))
    finally:
        fd_reserve.here.fill()


def leave() -> dict[str, Any]:
    """Leave all groups, for the number of ranks changes; see `resize`. All ranks, main thread."""
    from nbdist.engine.checkpoint import save
    from nbdist.engine.recovery import resize

    save.here.give_up("the number of ranks changes")
    return resize.leave(program().kernel.shell.user_ns)


def resend(first: int, next: int) -> list[dict[str, Any]]:
    """Return the record batches of `range(first, next)` that the push has lost."""
    return program().recorder.resend(first, next)


def missed(message: str, *, whole: bool = False) -> dict[str, Any]:
    """Return what a notebook has missed of a cell; see `Journal.told`. Control thread.

    With `whole` also `first_seq` and `next_seq`, the bounds of its records so far, and `facts`.
    """
    here = program()
    told = here.kernel.journal.told(message, whole=whole)
    if whole:
        told |= {"first_seq": here.first_seq, "next_seq": here.recorder.next_seq}
        told["facts"] = here.recorder.facts
    return told


def _log_to(stream: LogStream) -> None:
    """Send what nbdist logs to `stream`: what prints in a cell is the user's own."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    ours = logging.getLogger("nbdist")
    ours.addHandler(handler)
    ours.propagate = False


def _go_to_work(folders: list[str]) -> None:
    """Go to the first of these folders that is there."""
    for folder in folders:
        with contextlib.suppress(OSError):
            os.chdir(folder)
            return


def _was_freed(error: BaseException) -> bool:
    from nbdist.engine.group import group

    return group.was_released(error)


def _short_repr(value: object, limit: int = 4096) -> str:
    try:
        text = repr(value)
    except Exception as error:
        return f"<{type(value).__name__}, whose repr raised {type(error).__name__}>"
    return text if len(text) <= limit else text[:limit] + "…"


def main(arguments: list[str]) -> None:
    """Run as a fresh interpreter: `python -m nbdist.engine.rank.boot '{...}'`."""
    import json

    # `__main__` belongs to the user's code: run the module under its real name.
    from nbdist.engine.rank import boot

    boot.run(json.loads(arguments[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
