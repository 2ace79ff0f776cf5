"""Answers of the Kubernetes API and states of pods, in words for people. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from nbdist.shared.errors import StartError, install

# Reasons for which a container waits, and always will.
_REFUSED: Final = {
    "ErrImagePull": "its image cannot be pulled",
    "ImagePullBackOff": "its image cannot be pulled",
    "InvalidImageName": "its image's name is not valid",
    "ErrImageNeverPull": "its image is not on the node, and must not be pulled",
    "CreateContainerConfigError": "what its template refers to is missing",
    "CreateContainerError": "its container cannot be created",
    "RunContainerError": "its container cannot be started",
    "CrashLoopBackOff": "its container ends at once",
}
Pod = Mapping[str, Any]


def refusal(status: int, message: str) -> StartError:
    """Return the error for an answer of the API.

    Args:
        status: Of HTTP; 0 where there was no answer, -1 where no cluster is known here.
        message: Of the API, or of the client.
    """
    said = " ".join(message.split())
    if status == -1:
        return StartError(
            "This machine knows no Kubernetes cluster.",
            why=said,
            do="set KUBECONFIG, or start the notebook in a pod with a service account.",
        )
    if status == 0:
        return StartError(
            "The Kubernetes API does not answer.", why=said, do="kubectl cluster-info shows more."
        )
    if status == 401:
        return StartError(
            "Kubernetes does not know your login.", why=said, do="log in to the cluster again."
        )
    if status == 403 and "exceeded quota" in said:
        return StartError("The namespace's quota is used up.", why=said, do="ask for less.")
    if status == 403:
        return StartError(
            "Kubernetes does not allow you this.",
            why=said,
            do="ask for a role that may create and delete jobs, list pods and create pods/exec.",
        )
    if status == 404:
        return StartError("Kubernetes has no such namespace.", why=said, do="--namespace NAME")
    if status == 422:
        return StartError("Kubernetes refuses the Job.", why=said, do="see --pod-template.")
    return StartError(f"Kubernetes answers {status}.", why=said, do="kubectl get events")


def running(pods: Sequence[Pod]) -> list[int]:
    """Return the indexes of the pods that run."""
    return sorted(pod["index"] for pod in pods if pod["phase"] == "Running")


def never_starts(pods: Sequence[Pod], waited_s: float, most_s: float) -> StartError | None:
    """Return why pods will not start; None while they may.

    Args:
        pods: As the holder reports them (`host/kubernetes/pods.py`).
        waited_s: How long pods have been without a node.
        most_s: How long they may be: nodes may be on their way.
    """
    for pod in pods:
        if pod["waiting"] in _REFUSED:
            return StartError(
                f"Pod {pod['name']} cannot start: {_REFUSED[pod['waiting']]}.",
                why=f"{pod['waiting']}: {pod['message']}".rstrip(": "),
                do="check --image and --pod-template.",
            )
        if pod["phase"] == "Failed":
            return StartError(
                f"Pod {pod['name']} has ended at once.",
                why=pod["message"] or "its container failed",
                do="the image needs sh, sleep and cat; the template may limit it too much.",
            )
    if waited_s > most_s and (homeless := _unschedulable(pods)):
        return StartError(
            f"No node has room for pod {homeless[0]['name']}.",
            why=homeless[0]["unschedulable"],
            do="ask for less, or wait longer for new nodes: --pod-wait 600",
        )
    return None


def waiting_line(pods: Sequence[Pod], count: int) -> str:
    """Return one line about what is waited for."""
    line = f"pods: {len(running(pods))} of {count} run"
    if homeless := _unschedulable(pods):
        return f"{line}; no node has room: {homeless[0]['unschedulable'].partition('. ')[0]}"
    waiting = sorted({pod["waiting"] for pod in pods if pod["waiting"]})
    return f"{line}; {', '.join(waiting)}" if waiting else line


def is_unschedulable(pods: Sequence[Pod]) -> bool:
    """Return whether a pod has no node."""
    return bool(_unschedulable(pods))


def _unschedulable(pods: Sequence[Pod]) -> list[Pod]:
    return [pod for pod in pods if pod["unschedulable"]]


def explain(status: int, said: str) -> tuple[str, str]:
    """Return why a pod's stream ended, in words, and what to do."""
    if "No module named" in said:
        return "its image has no nbdist", f"{install()} when the image is built"
    if "not found" in said and "python" in said:
        return "its image has no python", "use an image with Python and nbdist"
    last = said.strip().splitlines()[-1:] or [
        "its parent process was killed, or the pod ended"
        if status
        else "its parent process has ended"
    ]
    return last[0], "kubectl describe pod shows more"
