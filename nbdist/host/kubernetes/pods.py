"""Holds a Job of Kubernetes for as long as the keeper lives, and tells how its pods are.

Run by the keeper as `python -m nbdist.host.kubernetes.pods`; its first request is

    {"op": "create", "namespace": ..., "job": {...}}

and its events, with an empty `host`, are `refused` (status, message), after which it ends, and at
each change `pods` (namespace, and for each pod `name`, `index`, `phase`, `waiting`, `message`,
`unschedulable`). It deletes the Job at the end of its input, by `quit` and by SIGTERM: with the
client loaded that takes one request. Where it is killed, pods end by themselves after their lease.
"""

import contextlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from nbdist.shared.errors import install

_LOOK_S: Final = 0.5  # between two looks at pods that do not run yet
_CALM_LOOK_S: Final = 10.0  # afterwards: only the log would tell
_ASK_S: Final = (4, 10)  # to connect, to answer
_NAMESPACE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_INDEX: Final = "batch.kubernetes.io/job-completion-index"
NO_CLUSTER: Final = -1
NO_ANSWER: Final = 0


class RefusedError(Exception):
    """The API does not do what it is asked; `status` is of HTTP, `NO_CLUSTER` or `NO_ANSWER`."""

    def __init__(self, status: int, message: str) -> None:
        """Keep both."""
        super().__init__(message)
        self.status = status
        self.message = message


class Api:
    """The few calls that are made of the Kubernetes API, as plain values."""

    def __init__(self) -> None:
        """Load the configuration: a kubeconfig's, else the pod's own.

        Raises:
            RefusedError: There is none.
        """
        try:
            from kubernetes import client, config
        except ImportError as error:
            message = f"{error}; {install('kubernetes')}"
            raise RefusedError(NO_CLUSTER, message) from error
        try:
            config.load_config()
            self.namespace = _namespace_of(config)
        except config.ConfigException as error:
            raise RefusedError(NO_CLUSTER, str(error)) from error
        settings = client.Configuration.get_default_copy()
        settings.retries = 1
        self._errors = client.ApiException
        made = client.ApiClient(settings)
        self.core = client.CoreV1Api(made)
        self._batch = client.BatchV1Api(made)

    def create_job(self, namespace: str, job: Mapping[str, Any]) -> None:
        """Create a Job."""
        self.call(self._batch.create_namespaced_job, namespace, job)

    def delete_job(self, namespace: str, name: str) -> None:
        """Delete a Job with its pods; nothing where it is gone."""
        with contextlib.suppress(RefusedError):
            self.call(
                self._batch.delete_namespaced_job,
                name,
                namespace,
                propagation_policy="Background",
            )

    def pods(self, namespace: str, job: str) -> list[dict[str, Any]]:
        """Return the Job's pods, as the API has them."""
        selector = f"batch.kubernetes.io/job-name={job}"
        data = self.call(self.core.list_namespaced_pod, namespace, label_selector=selector)
        found: list[dict[str, Any]] = json.loads(data)["items"]
        return found

    def call(self, method: Any, *arguments: Any, **options: Any) -> bytes:
        """Call a method of the client's, and return what it was answered.

        Raises:
            RefusedError: It was refused, or no server answered.
        """
        from urllib3.exceptions import HTTPError

        try:
            answer = method(*arguments, _request_timeout=_ASK_S, _preload_content=False, **options)
        except self._errors as error:
            raise RefusedError(error.status or NO_ANSWER, _message_of(error)) from error
        except (HTTPError, OSError) as error:
            raise RefusedError(NO_ANSWER, str(error)) from error
        data: bytes = answer.data
        return data


def _message_of(error: Any) -> str:
    try:
        message: str = json.loads(error.body)["message"]
    except (TypeError, ValueError, KeyError):
        return str(error.reason)
    return message


def _namespace_of(config: Any) -> str:
    """Return the namespace of the configuration that has been loaded."""
    try:
        context = config.list_kube_config_contexts()[1]["context"]
    except config.ConfigException:  # within a pod
        return _NAMESPACE.read_text().strip() if _NAMESPACE.exists() else "default"
    namespace: str = context.get("namespace") or "default"
    return namespace


def state_of(pod: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is said of a pod, from what the API has of it."""
    status = pod.get("status", {})
    metadata = pod["metadata"]
    states = [one.get("state", {}) for one in status.get("containerStatuses") or []]
    waiting = next((state["waiting"] for state in states if "waiting" in state), None) or {}
    ended = next((state["terminated"] for state in states if "terminated" in state), None) or {}
    homeless = [
        condition.get("message", "no node has room for it")
        for condition in status.get("conditions") or []
        if condition["type"] == "PodScheduled" and condition.get("reason") == "Unschedulable"
    ]
    is_leaving = "deletionTimestamp" in metadata
    message = waiting.get("message") or ended.get("message") or ended.get("reason")
    return {
        "name": metadata["name"],
        "index": int(metadata.get("annotations", {}).get(_INDEX, -1)),
        "phase": "Leaving" if is_leaving else status.get("phase", "Pending"),
        "waiting": waiting.get("reason", ""),
        "message": message or status.get("message", ""),
        "unschedulable": homeless[0] if homeless else "",
    }


def tell(**event: Any) -> None:
    """Tell the keeper."""
    print(json.dumps({**event, "host": ""}), flush=True)


class Requests:
    """Lines of standard input, read without blocking."""

    def __init__(self) -> None:
        """Begin with nothing read."""
        self._unread = b""
        self.ended = False

    def wait(self, timeout_s: float) -> list[dict[str, Any]]:
        """Return the requests that come within a time; `ended` tells that no more will."""
        if select.select([0], [], [], timeout_s)[0]:
            data = os.read(0, 1 << 16)
            self.ended = not data
            self._unread += data
        *lines, self._unread = self._unread.split(b"\n")
        requests = [json.loads(line) for line in lines]
        self.ended |= any(request["op"] == "quit" for request in requests)
        return requests


def hold(api: Api, requests: Requests) -> None:
    """Create the Job that is asked for first, tell of its pods, and delete it in the end."""
    wanted: dict[str, Any] | None = None
    while wanted is None and not requests.ended:
        found = [one for one in requests.wait(60) if one["op"] == "create"]
        wanted = found[0] if found else None
    if wanted is None:
        return
    namespace, job = wanted["namespace"] or api.namespace, wanted["job"]
    name = job["metadata"]["name"]
    # An answer that is lost, or an end in between, leaves no Job either.
    try:
        api.create_job(namespace, job)
        _follow(api, requests, namespace, name, job["spec"]["completions"])
    finally:
        api.delete_job(namespace, name)


def _follow(api: Api, requests: Requests, namespace: str, name: str, count: int) -> None:
    seen: list[dict[str, Any]] | None = None
    look_at = 0.0
    while not requests.ended:
        if time.monotonic() >= look_at:
            pods = sorted(map(state_of, api.pods(namespace, name)), key=lambda pod: pod["name"])
            if pods != seen:
                seen = pods
                tell(event="pods", namespace=namespace, pods=pods)
            are_running = sum(pod["phase"] == "Running" for pod in pods) == count
            look_at = time.monotonic() + (_CALM_LOOK_S if are_running else _LOOK_S)
        requests.wait(max(0.0, look_at - time.monotonic()))


def main() -> None:
    """Hold one Job."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # by way of what deletes the Job
    try:
        hold(Api(), Requests())
    except RefusedError as error:
        tell(event="refused", status=error.status, message=error.message)
        sys.exit(1)


if __name__ == "__main__":
    main()
