"""What answers and states of Kubernetes mean for people."""

from typing import Any

import pytest

from nbdist.client.cluster.launchers.kubernetes_words import (
    explain,
    never_starts,
    refusal,
    waiting_line,
)
from nbdist.host.kubernetes.pods import state_of

HOMELESS = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu. preemption: none."


def pod(index: int, phase: str = "Pending", **status: Any) -> dict[str, Any]:
    """Return what the holder tells of a pod, whose state is written as the API writes it."""
    annotations = {"batch.kubernetes.io/job-completion-index": str(index)}
    metadata = {"name": f"nbdist-a-{index}-xyz", "annotations": annotations}
    return state_of({"metadata": metadata, "status": {"phase": phase, **status}})


def waits(reason: str, message: str = "") -> dict[str, Any]:
    """Return the status of containers of which one waits."""
    state = {"waiting": {"reason": reason, "message": message}}
    return {"containerStatuses": [{"state": {"running": {}}}, {"state": state}]}


def unschedulable() -> dict[str, Any]:
    """Return the status of a pod without a node."""
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    return {"conditions": [condition | {"message": HOMELESS}]}


@pytest.mark.parametrize(
    ("status", "message", "says"),
    [
        (-1, "Invalid kube-config file", "knows no Kubernetes cluster"),
        (0, "connection refused", "does not answer"),
        (401, "Unauthorized", "does not know your login"),
        (403, 'jobs is forbidden: User "me" cannot', "does not allow you this"),
        (403, "forbidden: exceeded quota: gpus, requested: 4", "quota is used up"),
        (404, 'namespaces "x" not found', "no such namespace"),
        (422, "spec.template: Invalid value", "refuses the Job"),
        (500, "etcd", "answers 500"),
    ],
)
def test_a_refusal_is_one_sentence_with_the_apis_own_words(
    status: int, message: str, says: str
) -> None:
    error = refusal(status, message)
    assert says in error.what
    assert error.why == message
    assert error.do


def test_an_image_that_cannot_be_pulled_ends_the_wait() -> None:
    pods = [pod(0, "Running"), pod(1, **waits("ErrImagePull", "manifest unknown"))]
    error = never_starts(pods, 0.0, 20.0)
    assert error is not None
    assert error.what == "Pod nbdist-a-1-xyz cannot start: its image cannot be pulled."
    assert error.why == "ErrImagePull: manifest unknown"


def test_a_pod_without_a_node_is_waited_for_as_long_as_the_person_says() -> None:
    pods = [pod(0, **unschedulable())]
    assert never_starts(pods, 19.0, 20.0) is None
    assert waiting_line(pods, 2) == (
        "pods: 0 of 2 run; no node has room: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu"
    )
    error = never_starts(pods, 21.0, 20.0)
    assert error is not None
    assert error.why == HOMELESS
    assert "--pod-wait" in error.do


def test_the_line_tells_what_containers_wait_for() -> None:
    pods = [pod(0, "Running"), pod(1, **waits("ContainerCreating"))]
    assert waiting_line(pods, 3) == "pods: 1 of 3 run; ContainerCreating"
    assert never_starts(pods, 0.0, 20.0) is None


def test_a_pod_that_ended_at_once_is_told_with_its_reason() -> None:
    ended = {"containerStatuses": [{"state": {"terminated": {"reason": "OOMKilled"}}}]}
    error = never_starts([pod(0, "Failed", **ended)], 0.0, 20.0)
    assert error is not None
    assert error.why == "OOMKilled"


def test_a_pod_that_is_being_deleted_does_not_run() -> None:
    leaving = {
        "metadata": {"name": "a", "deletionTimestamp": "now"},
        "status": {"phase": "Running"},
    }
    assert state_of(leaving)["phase"] == "Leaving"


@pytest.mark.parametrize(
    ("status", "said", "why"),
    [
        (1, "python: No module named nbdist.host", "its image has no nbdist"),
        (127, "sh: 3: exec: python3: not found", "its image has no python"),
        (255, "pod nbdist-a-1 does not run", "pod nbdist-a-1 does not run"),
        (137, "", "its parent process was killed, or the pod ended"),
    ],
)
def test_the_end_of_a_stream_is_explained(status: int, said: str, why: str) -> None:
    assert explain(status, said)[0] == why
