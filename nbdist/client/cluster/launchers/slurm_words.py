"""The commands for Slurm, and its answers in words. Pure.

Options come from `%dist start`, from lines as in a batch script, and from a file of such lines (a
template): its `#SBATCH` lines are options, its other lines run on each node before the ranks'
parent: `module load`, `conda activate`.
"""

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nbdist.client.cluster.launchers.base import LaunchOptions
from nbdist.client.cluster.launchers.shared_options import NodesOptions
from nbdist.shared.errors import UsageError
from nbdist.shared.options import option

NOTICE_S = 60  # before the time limit, when Slurm notifies the parents
# Options of sbatch that salloc does not have, and that mean nothing to a notebook.
_OF_BATCHES = {
    *("-o", "--output", "-e", "--error", "-i", "--input", "--open-mode", "-a", "--array"),
    *("--requeue", "--no-requeue", "--parsable", "--export", "-W", "--wait", "--wrap"),
}
_SPEAKER = re.compile(r"^(salloc|srun|slurmstepd|squeue): (error: )?")
_WORD = re.compile(r"[^A-Za-z0-9_.-]+")
_SILENCE = r"Unable to contact|slurm_receive_msg|Could not establish a configuration source"

# What salloc and srun say, and what it means.
_MEANINGS = (
    (
        r"invalid partition specified: (\S+)",
        "Slurm has no partition {0}",
        "sinfo -s lists the partitions",
    ),
    (
        r"Invalid partition name specified|Requested partition configuration not available",
        "Slurm has no such partition, or it is closed to you",
        "sinfo -s lists the partitions",
    ),
    (
        r"(?:count|gres\)|feature) specification|More processors requested|node configuration",
        "no nodes of the partition have what was asked for",
        "sinfo -o '%P %D %c %m %G' shows nodes, CPUs, memory and GPUs of each partition",
    ),
    (
        r"Requested time limit is invalid",
        "the time limit is beyond the partition's, or there must be one",
        "give a shorter --time; sinfo -o '%P %l' shows the partitions' limits",
    ),
    (
        r"Invalid account or account/partition",
        "Slurm refuses your account for this partition",
        "name another: --sbatch --account=NAME",
    ),
    (
        _SILENCE,
        "Slurm's controller (slurmctld) does not answer",
        "sinfo shows when it is back",
    ),
    (
        r"DUE TO TIME LIMIT|Job has exceeded its time limit",
        "its allocation has reached its time limit",
        "%dist stop, and %dist start with a longer --time",
    ),
    (
        r"DUE TO PREEMPTION",
        "Slurm has given its node to another job (preemption)",
        "%dist stop, and %dist start again",
    ),
    (
        r"NODE FAILURE|Node failure",
        "Slurm has taken the node down",
        "%dist scale to fewer ranks, or start again",
    ),
    (
        r"Job allocation \d+ has been revoked|CANCELLED AT|Force Terminated|has been cancelled",
        "its job was cancelled",
        "%dist stop, and %dist start again",
    ),
    (
        r"unrecognized option '?(\S+?)'?$|(?:invalid|unrecognized) option -- '(\S+)'",
        "salloc does not know the option {0}",
        "salloc --help lists its options",
    ),
    (
        r"No module named (\S+)",
        "its Python has no module {0}",
        "activate another environment on the nodes, by a line of a template: --sbatch FILE",
    ),
    (
        r"python\S*: not found|execve\(\): \S+: No such file",
        "the node does not see this notebook's Python",
        "activate one on the nodes, by a line of a template: --sbatch FILE",
    ),
    (
        r"(?:env: )?['‘]?([\w./-]+)['’]?: (?:\[Errno 2\] )?No such file or directory",
        "{0} is not on this machine",
        "start on a login node of Slurm's",
    ),
)
# Reasons of a pending job that no waiting changes (squeue(1), JOB REASON CODES).
_NEVER = {
    "PartitionTimeLimit": "the partition's time limit is shorter",
    "PartitionNodeLimit": "the partition gives no job so many nodes",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition is inactive",
    "BadConstraints": "no node has what was asked for",
    "PartitionConfig": "the partition has not so many nodes, or its time limit is shorter",
    "InvalidAccount": "Slurm refuses your account",
    "InvalidQOS": "Slurm refuses this QOS",
    "JobHeldAdmin": "an administrator holds it",
    "JobHeldUser": "it is on hold",
    "ReqNodeNotAvail": "a node that was asked for is down or reserved",
}

_TIME = re.compile(
    r"(?:(?P<days>\d+)-(?P<day_hours>\d+)(?::(?P<day_minutes>\d+)(?::(?P<day_seconds>\d+))?)?"
    r"|(?P<hours>\d+):(?P<minutes>\d+):(?P<seconds>\d+)"
    r"|(?P<only_minutes>\d+)(?::(?P<only_seconds>\d+))?)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(NodesOptions):
    """The options of `--launcher slurm`."""

    partition: str = option("", "slurm: partition of the nodes", metavar="NAME")
    sbatch: Sequence[str] = option(
        (),
        "slurm: another of its options, as --sbatch=--mem=64G, or a file with #SBATCH lines, whose "
        "other lines run on each node first; may be repeated",
        "In Python they are a list.",
        metavar="LINE",
    )


@dataclass(frozen=True, slots=True)
class Wish:
    """What is asked of Slurm.

    Attributes:
        options: For salloc, in the order in which later ones win.
        before: Lines for each node's shell, before the parent begins.
        slots: Ranks a node; None where it follows from the number of nodes.
        n: Ranks in all, if the person said so.
        allocates: It wants nodes of its own; else those of the job that the notebook runs in.
    """

    options: tuple[str, ...]
    before: tuple[str, ...]
    slots: int | None
    n: int | None
    allocates: bool

    def slots_of(self, nodes: int) -> int:
        """Return the ranks that each of so many nodes takes."""
        return self.slots or max(1, math.ceil((self.n or 1) / nodes))


def read_wish(asked: LaunchOptions[Options], environment: Mapping[str, str]) -> Wish:
    """Return what `%dist start` asks of Slurm.

    Within a job its nodes are taken, unless an option asks for others.

    Raises:
        UsageError: An option makes no sense.
    """
    own = asked.own
    lines, before = read_lines(own.sbatch)
    allocates = bool(own.nodes or own.partition or own.time or lines)
    allocates = allocates or "SLURM_JOB_ID" not in environment
    options = []
    if own.nodes:
        options.append(f"--nodes={own.nodes}")
        if asked.n:
            options.append(f"--ntasks-per-node={math.ceil(asked.n / own.nodes)}")
    elif asked.n:
        options += ["--nodes=1", f"--ntasks-per-node={asked.n}"]
    if own.gpus_per_node:
        options.append(f"--gpus-per-node={own.gpus_per_node}")
    if own.partition:
        options.append(f"--partition={own.partition}")
    if own.time:
        options.append(f"--time={own.time}")
    slots = own.gpus_per_node
    if slots is None and asked.n is None:
        slots = _slots(lines) if allocates else _slots_within(environment)
    return Wish((*options, *lines), before, slots, asked.n, allocates)


def read_lines(lines: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the options in what `--sbatch` was given, and the lines for each node's shell.

    Raises:
        UsageError: One is neither an option nor a file.
    """
    options: list[str] = []
    before: list[str] = []
    for line in lines:
        if (file := Path(line).expanduser()).is_file():
            of_file, then = _read_template(file.read_text())
            options += of_file
            before += then
        elif (bare := line.removeprefix("#SBATCH").strip()).startswith("-"):
            options += shlex.split(bare)
        else:
            raise UsageError(
                f"--sbatch is an option of Slurm or a file of #SBATCH lines, not {line!r}.",
                do='--sbatch "--mem=64G"',
            )
    return tuple(options), tuple(before)


def _read_template(text: str) -> tuple[list[str], list[str]]:
    options, before = [], []
    for line in text.splitlines():
        if line.startswith("#SBATCH"):
            words = shlex.split(line.removeprefix("#SBATCH"), comments=True)
            if words and words[0].partition("=")[0] not in _OF_BATCHES:
                options += words
        elif line.strip() and not line.startswith("#"):
            before.append(line)
    return options, before


def _slots(options: Sequence[str]) -> int | None:
    """Return the ranks a node that the person's options ask for."""
    joined = " ".join(options)
    for pattern in (r"--gpus-per-node[= ](?:\w+:)*(\d+)", r"--gres[= ]gpu:(?:\w+:)*(\d+)"):
        if found := re.search(pattern, joined):
            return int(found[1])
    found = re.search(r"--ntasks-per-node[= ](\d+)", joined)
    return int(found[1]) if found else None


def _slots_within(environment: Mapping[str, str]) -> int | None:
    for name in ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE", "SLURM_NTASKS_PER_NODE"):
        if found := re.search(r"(\d+)$", environment.get(name, "")):
            return int(found[1])
    return None


def seconds_of(time_limit: str) -> int | None:
    """Return a time limit in seconds, read as Slurm reads it; None where it is none."""
    found = _TIME.fullmatch(time_limit)
    if found is None:
        return None
    named = {name: int(digits) for name, digits in found.groupdict().items() if digits}
    hours = named.get("days", 0) * 24 + named.get("day_hours", 0) + named.get("hours", 0)
    minutes = sum(named.get(name, 0) for name in ("day_minutes", "minutes", "only_minutes"))
    seconds = sum(named.get(name, 0) for name in ("day_seconds", "seconds", "only_seconds"))
    return (hours * 60 + minutes) * 60 + seconds


def job_name(notebook: str, token: str) -> str:
    """Return a name by which a person knows the job, and `scancel --name` no other one."""
    return f"nbdist-{_WORD.sub('-', notebook).strip('-') or 'notebook'}-{token}"


def allocate(name: str, wish: Wish) -> list[str]:
    """Return the command that asks for nodes, and keeps them until its input ends.

    A node that fails must not end the job (`--no-kill`). Ranks ignore SIGURG, which Slurm sends to
    the parents shortly before the time limit.
    """
    return [
        "salloc",
        f"--job-name={name}",
        "--no-kill",
        "--wait-all-nodes=1",
        f"--signal=URG@{NOTICE_S}",
        *wish.options,
        *("sh", "-c", "exec cat > /dev/null"),
    ]


def on_node(job: str, node: str, script: str) -> list[str]:
    """Return the command that runs a shell script on one node of a job."""
    return [
        "srun",
        f"--jobid={job}",
        *("--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={node}"),
        *("--cpu-bind=none", "--mem=0", "--mpi=none", "--export=ALL", "--kill-on-bad-exit=0"),
        *("sh", "-c", script),
    ]


def meaning(said: str) -> tuple[str, str] | None:
    """Return what Slurm's messages mean, and what to do; None where they are not known."""
    for sign, sentence, do in _MEANINGS:
        if found := re.search(sign, said, re.MULTILINE):
            words = [group for group in found.groups() if group]
            return sentence.format(*(words or [""])), do
    return None


def is_silence(said: str) -> bool:
    """Return whether this says that Slurm's controller does not answer."""
    return re.search(_SILENCE, said) is not None


def explain(status: int, said: str) -> tuple[str, str]:
    """Return why a command of Slurm's ended, in words, and what to do."""
    if (known := meaning(said)) is not None:
        return known
    lines = [_SPEAKER.sub("", line) for line in said.splitlines() if line.strip()]
    last = lines[-1] if lines else f"the command ended with exit code {status}"
    return last.rstrip("."), "%dist start again; man salloc has the options"


def never_starts(reason: str) -> str | None:
    """Return why a pending job will never start, in words; None where it may."""
    return _NEVER.get(reason.partition(",")[0])


def waiting_line(job: str, state: str, reason: str, start: str) -> str:
    """Return the line that is shown while a job waits.

    Args:
        job: Its id.
        state: As squeue's `%T` shows it.
        reason: As `%r`.
        start: When it is expected to start, as `%S`: "N/A" where it is unknown.
    """
    line = f"{state.lower()}: job {job}"
    if reason not in ("None", ""):
        line += f", {reason}"
    if "T" in start:
        line += f", starts about {start.replace('T', ' ')[:16]}"
    return line
