"""What `ssh` is for other hosts: runs a shell's script in a pod, by a stream of the Kubernetes API.

`python -m nbdist.host.kubernetes.pod_exec NAMESPACE JOB INDEX SCRIPT` joins the newest running pod
of that index. Standard input, output and error are the script's. Ends with its input, with the
stream, and with the script, whose exit status is its own.

Threads: the main one hears the pod; `nbdist-input` passes the input on.
"""

import os
import sys
import threading
import time
from typing import Any, Final

from nbdist.host.kubernetes.pods import Api, RefusedError, state_of

_STDIN, _STDOUT, _STDERR, _STATUS = range(4)
_PIECE: Final = 1 << 15
_END_S: Final = 1.5  # the keeper waits for 2
_LOST: Final = 255  # as ssh says it


def main(arguments: list[str]) -> int:
    """Return the exit status."""
    namespace, job, index, script = arguments
    try:
        api = Api()
        stream = _open(api, namespace, _pod(api, namespace, job, int(index)), script)
    except RefusedError as error:
        print(" ".join(error.message.split()), file=sys.stderr)
        return _LOST
    threading.Thread(target=_pass_input, args=(stream,), name="nbdist-input", daemon=True).start()
    return _pass_output(stream)


def _pod(api: Api, namespace: str, job: str, index: int) -> str:
    pods = [
        (pod["metadata"]["creationTimestamp"], state_of(pod)) for pod in api.pods(namespace, job)
    ]
    mine = [(made, pod["phase"], pod["name"]) for made, pod in pods if pod["index"] == index]
    running = [(made, name) for made, phase, name in mine if phase == "Running"]
    if not running:
        why = f"pod {max(mine)[2]} does not run" if mine else f"pod {index} of {job} is gone"
        raise RefusedError(404, why)
    _, name = max(running)
    return str(name)


def _open(api: Api, namespace: str, pod: str, script: str) -> Any:
    from kubernetes.client import ApiException
    from kubernetes.stream import stream

    try:
        return stream(
            api.core.connect_get_namespaced_pod_exec,
            pod,
            namespace,
            command=["sh", "-c", script],
            stdin=True,
            stdout=True,
            stderr=True,
            tty=False,
            binary=True,
            _preload_content=False,
        )
    except ApiException as error:
        raise RefusedError(error.status, f"{pod}: {error.reason}") from error


def _pass_input(stream: Any) -> None:
    """Pass the input on; after its end the script may end by itself, then the stream is cut."""
    try:
        while data := os.read(0, _PIECE):
            stream.write_channel(_STDIN, data)
    except Exception as error:  # the stream is gone, which the other thread tells
        print(f"the pod hears nothing more: {error}", file=sys.stderr)
        return
    # Only version 5 of the protocol can close the input alone.
    stream.close_channel(_STDIN)
    time.sleep(_END_S)
    os._exit(_LOST)


def _pass_output(stream: Any) -> int:
    while stream.is_open():
        try:
            stream.update(timeout=None)
        except Exception as error:
            print(f"the stream of the pod ended: {error}", file=sys.stderr)
            return _LOST
        _write_out(stream)
    _write_out(stream)
    try:
        status = stream.returncode
    except (TypeError, KeyError, ValueError):  # closed without a word
        return _LOST
    return _LOST if status is None else int(status)


def _write_out(stream: Any) -> None:
    """Write what has come of both channels, standard output last.

    To read a channel of which nothing has come takes the next frame, of whichever channel: after an
    answer of the parent's there may be no other, and it would lie there.
    """
    for channel, descriptor in ((_STDERR, 2), (_STDOUT, 1)):
        data = stream.read_channel(channel)
        while data:
            data = data[os.write(descriptor, data) :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
