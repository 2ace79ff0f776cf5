"""The Kubernetes Job whose pods are hosts of a cluster: what is asked for, as a manifest. Pure.

Its pods wait. A parent is started in each by an exec stream of the API server, as ssh starts one on
a host: no port is opened for it, and the pods know nothing of the notebook.
"""

import copy
import getpass
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from nbdist.client.cluster.launchers.base import LaunchOptions
from nbdist.client.cluster.launchers.shared_options import NodesOptions
from nbdist.client.cluster.launchers.slurm_words import seconds_of
from nbdist.shared.errors import UsageError
from nbdist.shared.options import option, read_seconds

LEASE_S: Final = 120  # for which pods wait for a parent: a notebook's machine may have died
INDEX: Final = "batch.kubernetes.io/job-completion-index"
JOB: Final = "batch.kubernetes.io/job-name"
_WORD: Final = re.compile(r"[^a-z0-9]+")
_KEPT_S: Final = 60  # after its pods have ended by themselves

# Where the parent's pid is, for the shell that is process 1: it passes SIGTERM on, by which a pod
# is terminated, and ends with the parent, or when none has been there for the lease.
_PID: Final = '"${TMPDIR:-/tmp}/nbdist-parent"'
_LIVES: Final = f'kill -0 "$(cat {_PID} 2>/dev/null)" 2>/dev/null'
WAIT: Final = f"""leave() {{
  kill -TERM "$(cat {_PID} 2>/dev/null)" 2>/dev/null
  while {_LIVES}; do sleep 0.2; done
  exit 143
}}
trap leave TERM INT
left={LEASE_S}
while [ "$left" -gt 0 ]; do
  if {_LIVES}; then left={LEASE_S}; else left=$((left - 1)); fi
  sleep 1 & wait $!
done"""
PARENT: Final = f"""p=python; command -v python >/dev/null 2>&1 || p=python3
echo $$ > {_PID} || exit 1
exec $p -m nbdist.host.parent stdio fork"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(NodesOptions):
    """The options of `--launcher kubernetes`."""

    image: str = option("", "kubernetes: image of the pods, which has nbdist")
    namespace: str = option(
        "",
        "kubernetes: where the pods are",
        "By default the namespace of the cluster's configuration.",
        metavar="NAME",
    )
    pod_template: str = option(
        "",
        "kubernetes: a file with a pod, for its resources, volumes, tolerations",
        metavar="FILE",
    )
    pod_wait: float = option(
        20.0,
        "kubernetes: how long pods may be without a node (default: 20)",
        metavar="SECONDS",
        read=read_seconds,
    )


@dataclass(frozen=True, slots=True)
class PodRequest:
    """What is asked of Kubernetes.

    Attributes:
        pods: How many.
        slots: Ranks that each takes.
        gpus: Of each pod.
        image: Of the container; "" where the template names one.
        time_limit_s: After which Kubernetes ends all of it.
        template: A pod as the person wrote it; its first container is the ranks'.
    """

    pods: int
    slots: int
    gpus: int = 0
    image: str = ""
    time_limit_s: int | None = None
    template: Mapping[str, Any] = field(default_factory=dict)


def read_request(asked: LaunchOptions[Options], template: Mapping[str, Any]) -> PodRequest:
    """Return what `%dist start` asks of Kubernetes.

    Args:
        asked: The options.
        template: What the file of `--pod-template` holds; empty without one.

    Raises:
        UsageError: An option makes no sense, or there is no image.
    """
    own = asked.own
    if template and not isinstance(template.get("spec"), Mapping):
        raise UsageError("--pod-template is a file with a pod: its `spec:` is missing.")
    limit = seconds_of(own.time) if own.time else None
    if own.time and not limit:
        raise UsageError(f"--time is minutes or 2:00:00, not {own.time!r}.")
    if not own.image and "image" not in _container(dict(template)):
        raise UsageError(
            "--launcher kubernetes needs an image.",
            do="%dist start --launcher kubernetes --image REGISTRY/IMAGE --nodes 2",
        )
    pods = own.nodes or 1
    slots = own.gpus_per_node or math.ceil((asked.n or pods) / pods)
    return PodRequest(pods, slots, own.gpus_per_node or 0, own.image, limit, template)


def job_name(notebook: str, token: str) -> str:
    """Return a name by which a person knows the Job; pods append their number to it."""
    return f"nbdist-{_slug(notebook)[:24].strip('-') or 'notebook'}-{token}"


def job(name: str, request: PodRequest) -> dict[str, Any]:
    """Return the manifest of an indexed Job."""
    labels = {
        "app.kubernetes.io/managed-by": "nbdist",
        "app.kubernetes.io/instance": name,
        "nbdist/owner": _slug(_user()) or "unknown",
    }
    spec = {
        "completionMode": "Indexed",
        "completions": request.pods,
        "parallelism": request.pods,
        # A pod that is lost is replaced, for %dist restart.
        "backoffLimit": 20,
        "ttlSecondsAfterFinished": _KEPT_S,
        "template": _pod(request, labels),
    }
    if request.time_limit_s:
        spec["activeDeadlineSeconds"] = request.time_limit_s
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": labels},
        "spec": spec,
    }


def _pod(request: PodRequest, labels: Mapping[str, str]) -> dict[str, Any]:
    template = copy.deepcopy(dict(request.template))
    metadata = {key: value for key, value in template.get("metadata", {}).items() if key != "name"}
    metadata["labels"] = {**metadata.get("labels", {}), **labels}
    container = _container(template)
    container.setdefault("name", "ranks")
    if request.image:
        container["image"] = request.image
    container["command"] = ["sh", "-c", WAIT]
    container.pop("args", None)
    _ask_for_resources(container, request)
    spec = template.setdefault("spec", {})
    spec["containers"] = [container, *spec.get("containers", [])[1:]]
    spec["restartPolicy"] = "Never"
    # Cells are a person's code, which has no business with the cluster's API.
    spec.setdefault("automountServiceAccountToken", False)
    _give_shared_memory(spec, container)
    return {"metadata": metadata, "spec": spec}


def _container(template: dict[str, Any]) -> dict[str, Any]:
    containers = template.get("spec", {}).get("containers") or [{}]
    first: dict[str, Any] = containers[0]
    return first


def _ask_for_resources(container: dict[str, Any], request: PodRequest) -> None:
    resources = container.setdefault("resources", {})
    if request.gpus:
        resources.setdefault("limits", {})["nvidia.com/gpu"] = str(request.gpus)
    if "cpu" not in {**resources.get("limits", {}), **resources.get("requests", {})}:
        resources.setdefault("requests", {})["cpu"] = str(request.slots)


def _give_shared_memory(spec: dict[str, Any], container: dict[str, Any]) -> None:
    """Replace the 64 MiB of a container: data loaders, NCCL and checks of ranks share more."""
    mounts = container.setdefault("volumeMounts", [])
    if all(mount["mountPath"] != "/dev/shm" for mount in mounts):
        mounts.append({"name": "nbdist-shm", "mountPath": "/dev/shm"})
        volume = {"name": "nbdist-shm", "emptyDir": {"medium": "Memory"}}
        spec.setdefault("volumes", []).append(volume)


def _slug(text: str) -> str:
    return _WORD.sub("-", text.lower()).strip("-")


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user that has no name
        return ""
