"""Slurm on test hosts: munge and slurmd on all, slurmctld on the first, one partition, `main`.

Settings that a user meets are Slurm's own defaults, but for those that make failures quick.
"""

import secrets
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.hosts.bed import Bed
from tests.hosts.host import Host
from tests.hosts.waiting import wait_until

# Two CPUs and two GPUs a node, as far as Slurm knows: device files that exist stand for GPUs.
# Up to four jobs share each CPU, so that a test need not wait for another's end.
_SETTINGS = """\
ClusterName=bed
SlurmctldHost={controller}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir=/run/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
MpiDefault=none
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=10
MessageTimeout=4
TCPTimeout=1
KillWait=5
SchedulerParameters=batch_sched_delay=0
{nodes}
PartitionName=main Nodes={names} Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""
_NODE = "NodeName={0.name} NodeAddr={0.address} CPUs=2 RealMemory=4000 Gres=gpu:2 State=UNKNOWN"
_GPUS = "Name=gpu File=/dev/zero\nName=gpu File=/dev/full\n"
# Where control groups are of version 2, slurmd would ask a systemd that no test host has.
_CONTROL_GROUPS = "IgnoreSystemd=yes\n"


class Slurm:
    """Slurm on all hosts of `bed`; `with Bed() as bed: slurm = Slurm(bed)`.

    Its programs find it without any variable in each host: notebooks and logins use it as is.
    """

    def __init__(self, bed: Bed) -> None:
        self.bed = bed
        self.hosts = list(bed.hosts.values())
        self.controller = self.hosts[0]
        self.folder = bed.shared / "slurm"
        self._start()

    def run(
        self,
        command: Sequence[str],
        *,
        timeout_s: float = 60,
        stdin: str = "",
        env: Mapping[str, str] | None = None,
        check: bool = True,
    ) -> "subprocess.CompletedProcess[str]":
        """Run `squeue`, `sbatch`, `srun`, ... on the controller, in its home.

        `srun` without `--immediate` waits for ever for nodes that never come: hence the time.
        """
        return self.controller.run(command, timeout_s=timeout_s, stdin=stdin, env=env, check=check)

    def submit(self, words: Sequence[str]) -> str:
        """Submit a job with `sbatch`, and return its id.

        Its time limit is in minutes, and looked at twice a minute. To have it end sooner:
        `scontrol update JobId=... EndTime=now+5`, which then takes up to 30 s.
        """
        return self.run(["sbatch", "--parsable", *words]).stdout.strip()

    def jobs(self) -> list[str]:
        """Return the jobs in the queue, one line each: id, name, state, nodes or the reason."""
        return self.run(["squeue", "--noheader", "--format=%i %j %T %R"]).stdout.splitlines()

    def node_states(self) -> dict[str, str]:
        """Return the state of each node by its name: "idle", "mixed", "down*", ..."""
        rows = self.run(["sinfo", "--noheader", "-N", "--format=%N %T"]).stdout.splitlines()
        return dict(row.split() for row in rows)

    def node_down(self, name: str) -> None:
        """Cut a node's power; Slurm notices it after `SlurmdTimeout`, 10 s."""
        assert name != self.controller.name, "the controller's host is the notebook's, too"
        self.bed[name].power_cut()

    def stop_controller(self) -> None:
        """Kill slurmctld: nobody answers squeue, salloc or scancel any more."""
        pid = int(self.controller.path("/run/slurmctld.pid").read_text())
        self.controller.run(["kill", "-9", str(pid)])
        wait_until(lambda: self.run(["sinfo"], check=False).returncode, "nobody answers sinfo")

    def start_controller(self) -> None:
        """Start slurmctld again; it knows of its jobs."""
        self.controller.run(["slurmctld"])
        wait_until(lambda: not self.run(["sinfo"], check=False).returncode, "slurmctld answers")
        self.controller.count_as_services()

    def reset(self) -> None:
        """Cancel all jobs, and start anew what a test has broken."""
        if self._is_broken():
            for host in self.hosts:
                host.is_touched = True
            self.bed.reset()
            self._start()
            return
        self.run(["scontrol", "update", "PartitionName=main", "State=UP"])
        if self.jobs() or self.left_running():
            self.run(["scancel", "--signal=KILL", "--full", "--user=root"])
            self.run(["scancel", "--user=root"])
            wait_until(lambda: not self.jobs() and not self.left_running(), "all jobs end")

    def logs(self) -> str:
        """Return what the daemons have written, for the message of a failure."""
        files = sorted(self.folder.glob("*.log"))
        return "\n".join(f"== {file.name}\n{file.read_text()[-4000:]}" for file in files)

    def _is_broken(self) -> bool:
        return any(not host.is_on or host.is_touched for host in self.hosts) or not {
            "idle",
            "mixed",
            "allocated",
            "completing",
        }.issuperset(self.node_states().values())

    def left_running(self) -> list[str]:
        """Return what runs on all hosts beside their services: what jobs have left behind."""
        return [line for host in self.hosts for line in host.left_running()]

    def _start(self) -> None:
        self._write_settings()
        for host in self.hosts:
            host.run(["mount", "-n", "--bind", str(self.folder), "/etc/slurm"])
            _start_munge(host, self.folder / "munge.key")
        self.controller.run(["slurmctld", "-i"])
        for host in self.hosts:
            host.run(["slurmd", "-N", host.name])
        wait_until(self._is_idle, "all nodes are idle")
        for host in self.hosts:
            host.count_as_services()

    def _is_idle(self) -> bool:
        done = self.run(["sinfo", "--noheader", "-N", "--format=%T"], check=False)
        return done.stdout.split() == ["idle"] * len(self.hosts)

    def _write_settings(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)  # the jobs of the last time
        (self.folder / "state").mkdir(parents=True)
        text = _SETTINGS.format(
            controller=self.controller.name,
            address=self.controller.address,
            folder=self.folder,
            nodes="\n".join(_NODE.format(host) for host in self.hosts),
            names=",".join(host.name for host in self.hosts),
        )
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "gres.conf").write_text(_GPUS)
        (self.folder / "cgroup.conf").write_text(_CONTROL_GROUPS)
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)


def _start_munge(host: Host, key: Path) -> None:
    """Start the daemon by which Slurm knows who asks; all hosts of a cluster have the same key."""
    files = [f"--{kind}-file=/run/munge/munged.{kind}" for kind in ("log", "pid", "seed")]
    host.run(["munged", f"--key-file={key}", *files])
