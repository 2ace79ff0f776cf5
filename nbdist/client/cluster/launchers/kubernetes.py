"""Hosts of Kubernetes: pods of a Job that lives as long as the keeper, and one exec stream a pod.

The Job is held by a process of the keeper's (`host/kubernetes/pods.py`), which deletes it at the
end of its input, and reports the state of its pods; `host/kubernetes/pod_exec.py` is the `ssh` to
one of them. The notebook's kernel never imports the Kubernetes client.
"""

import os
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from nbdist.client.cluster.launchers import kubernetes_manifest, kubernetes_words
from nbdist.client.cluster.launchers.base import KUBERNETES, LaunchOptions
from nbdist.client.cluster.launchers.hosts.host import Channel
from nbdist.client.cluster.launchers.hosts.hosts import HostsLauncher
from nbdist.client.cluster.launchers.kubernetes_manifest import Options
from nbdist.client.cluster.launchers.slurm_queue import Line
from nbdist.client.cluster.network import has_curve, require_trust
from nbdist.shared.errors import StartError, UsageError

_LOOK_S: Final = 1.0  # between two looks at the state of the pods; sooner at each event
_ANSWER_S: Final = 30.0  # for the first word of the API; the client gives up before


def make_launcher(logs: Path, asked: LaunchOptions[Options]) -> "KubernetesLauncher":
    """Return a launcher that has asked for its pods.

    Raises:
        StartError: The network is not trusted.
        UsageError: An option makes no sense.
    """
    request = kubernetes_manifest.read_request(asked, _read_template(asked.own.pod_template))
    require_trust(
        "Ranks of several pods meet over the network",
        "between pods",
        trust_network=asked.trust_network,
        has_curve=has_curve(),
    )
    return KubernetesLauncher(logs, request, asked.own.namespace, asked.own.pod_wait)


def _read_template(name: str) -> Mapping[str, Any]:
    if not name:
        return {}
    try:
        read = yaml.safe_load(Path(name).expanduser().read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UsageError(f"--pod-template {name} cannot be read: {error}") from error
    if not isinstance(read, Mapping):
        raise UsageError(f"--pod-template {name} holds no pod.")
    return read


class KubernetesLauncher(HostsLauncher):
    """Processes in the pods of one Job."""

    def __init__(
        self,
        log_folder: Path,
        request: kubernetes_manifest.PodRequest,
        namespace: str,
        unschedulable_s: float,
    ) -> None:
        """Ask for the pods; returns at once.

        Args:
            log_folder: Where logs go (0700).
            request: What is asked for.
            namespace: Where; "" for that of the cluster's configuration.
            unschedulable_s: How long pods may be without a node.
        """
        super().__init__(log_folder, ())
        self._request = request
        self._namespace = namespace
        self._unschedulable_s = unschedulable_s
        notebook = Path(os.environ.get("JPY_SESSION_NAME", "") or Path.cwd()).stem
        self._job = kubernetes_manifest.job_name(notebook, secrets.token_hex(3))
        self._heard: dict[str, Any] | None = None  # the newest event of the holder
        log = log_folder / f"{self._job}.log"
        self._keeper.open(
            KUBERNETES, [sys.executable, "-m", "nbdist.host.kubernetes.pods"], {}, log
        )
        manifest = kubernetes_manifest.job(self._job, request)
        create = {"op": "create", "namespace": namespace, "job": manifest}
        self._keeper.send(KUBERNETES, create)

    def meet(self, asked: str) -> str:
        """Wait until the pods run, then meet them; see `Launcher.meet`."""
        self._wait_for_pods()
        self.open([self._channel(index) for index in range(self._request.pods)])
        return super().meet(asked)

    def _channel(self, index: int) -> Channel:
        words = [self._namespace, self._job, str(index), kubernetes_manifest.PARENT]
        command = [sys.executable, "-m", "nbdist.host.kubernetes.pod_exec", *words]
        return Channel(
            f"{self._job}-{index}", self._request.slots, command, explain=kubernetes_words.explain
        )

    def _wait_for_pods(self) -> None:
        """Wait until all pods run, and show until then what they wait for.

        Raises:
            StartError: Kubernetes refuses the Job, or pods will never start.
        """
        line = Line()
        began = homed_at = time.monotonic()
        try:
            while True:
                pods = self._pods()
                now = time.monotonic()
                if pods is None:
                    if now - began > _ANSWER_S:
                        raise kubernetes_words.refusal(0, f"no word within {_ANSWER_S:.0f} s")
                else:
                    if len(kubernetes_words.running(pods)) == self._request.pods:
                        return
                    homed_at = homed_at if kubernetes_words.is_unschedulable(pods) else now
                    most_s = self._unschedulable_s
                    if never := kubernetes_words.never_starts(pods, now - homed_at, most_s):
                        raise never
                    line.show(kubernetes_words.waiting_line(pods, self._request.pods))
                with self._hosts.news:
                    self._hosts.news.wait(_LOOK_S)
        finally:
            line.end()

    def _pods(self) -> Sequence[Mapping[str, Any]] | None:
        """Return the pods as last reported; None before that.

        Raises:
            StartError: Kubernetes refuses the Job, or who holds it has ended.
        """
        event = self._heard
        if event is None:
            return None
        if event["event"] == "refused":
            raise kubernetes_words.refusal(event["status"], event["message"])
        if event["event"] == "closed":
            raise StartError("The process that holds the pods has ended.", why=event["said"])
        self._namespace = event["namespace"]
        pods: Sequence[Mapping[str, Any]] = event["pods"]
        return pods

    def notice_of(self, host: str, number: str) -> str:
        """Return what it means: Kubernetes evicts the pod, or drains its node."""
        return f"Kubernetes ends pod {host}."

    def _take(self, event: dict[str, Any]) -> None:
        if event.get("channel") != KUBERNETES:
            super()._take(event)
            return
        with self._hosts.news:
            # Why it was refused says more than that its holder has ended then.
            if self._heard is None or self._heard["event"] != "refused":
                self._heard = event
            self._hosts.news.notify_all()
