"""A small API server of Kubernetes: what the official client needs to hold Jobs and exec in pods.

Pods are processes of this machine, each with a `TMPDIR` of its own. It keeps to the API's manifests
(`kubernetes-validate`), states, and protocol of exec streams. It does not show what a cluster adds:
nodes, images, networks, roles.

Threads: one event loop in a thread of its own; `pods` may be read from any.
"""

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kubernetes_validate
from aiohttp import WSMsgType, web

NAMESPACE = "team"
_VERSION = "1.33"
_INDEX = "batch.kubernetes.io/job-completion-index"
_GRACE_S = 5.0
_EVICTION_GRACE_S = 30.0  # Kubernetes' own default
_SECOND, _OF_FILE = "sleep 1 &", 'sleep "$(cat second)" &'
_KUBECONFIG = """\
apiVersion: v1
kind: Config
clusters: [{{name: fake, cluster: {{server: "{url}"}}}}]
users: [{{name: me, user: {{token: secret}}}}]
contexts: [{{name: me, context: {{cluster: fake, user: me, namespace: {namespace}}}}}]
current-context: me
"""


@dataclass
class Pod:
    """A pod and its processes."""

    document: dict[str, Any]
    job: str
    folder: Path
    process: "subprocess.Popen[bytes] | None" = None
    execs: list[asyncio.subprocess.Process] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return {**os.environ, "PATH": path, "TMPDIR": str(self.folder)}


class ApiServer:
    """Serves from `start` to `close`; images whose names begin with `missing` cannot be pulled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pods: dict[str, Pod] = {}
        self.jobs: dict[str, dict[str, Any]] = {}
        self.seen: list[str] = []  # methods and paths of all requests
        self.forbids = ""  # a word in a path that may not be asked for
        self._numbers = itertools.count()
        self._tasks: list[asyncio.Future[None]] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def start(self) -> Path:
        """Begin to serve; return the kubeconfig."""
        self._thread.start()
        port = asyncio.run_coroutine_threadsafe(self._serve(), self._loop).result(20)
        file = self.folder / "kubeconfig"
        url = f"http://127.0.0.1:{port}"
        file.write_text(_KUBECONFIG.format(url=url, namespace=NAMESPACE))
        return file

    def close(self) -> None:
        """End all pods, and the server."""
        asyncio.run_coroutine_threadsafe(self._end_all(), self._loop).result(30)
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(20)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)
        self._loop.close()

    def kill(self, name: str) -> None:
        """Lose a pod with its node: all its processes end at once. The Job has a new one made."""
        pod = self.pods.pop(name)
        self._kill(pod)
        index = int(pod.document["metadata"]["annotations"][_INDEX])
        self._create_pod(self.jobs[pod.job], index)

    def hurry(self) -> None:
        """Let each pod's process 1 count fifty seconds in one."""
        for pod in self.pods.values():
            (pod.folder / "second").write_text("0.02")

    def evict(self, name: str) -> None:
        """Have a pod leave, as a drained node does; the Job has a new one made at once."""
        asyncio.run_coroutine_threadsafe(self._evict(name), self._loop).result(20)

    async def _evict(self, name: str) -> None:
        pod = self.pods[name]
        self._create_pod(self.jobs[pod.job], int(pod.document["metadata"]["annotations"][_INDEX]))
        self._tell_to_leave(pod)
        self._tasks.append(asyncio.ensure_future(self._remove(name, _EVICTION_GRACE_S)))

    async def _end_all(self) -> None:
        for task in self._tasks:
            task.cancel()
        for name in list(self.jobs):
            await self._end(name)

    async def _serve(self) -> int:
        application = web.Application(middlewares=[self._guard])
        jobs = "/apis/batch/v1/namespaces/{namespace}/jobs"
        pods = "/api/v1/namespaces/{namespace}/pods"
        application.router.add_post(jobs, self._create_job)
        application.router.add_delete(jobs + "/{name}", self._delete_job)
        application.router.add_get(pods, self._list_pods)
        application.router.add_get(pods + "/{name}/exec", self._exec)
        self._runner = web.AppRunner(application)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self._tasks.append(asyncio.ensure_future(self._end_finished_jobs()))
        port: int = self._runner.addresses[0][1]
        return port

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.seen.append(f"{request.method} {request.path}")
        if request.headers.get("Authorization") != "Bearer secret":
            return _status(401, "Unauthorized")
        if request.match_info.get("namespace") != NAMESPACE:
            return _status(404, f'namespaces "{request.match_info.get("namespace")}" not found')
        if self.forbids and self.forbids in request.path:
            return _status(403, f'{self.forbids} is forbidden: User "me" cannot do this')
        answer: web.StreamResponse = await handler(request)
        return answer

    async def _create_job(self, request: web.Request) -> web.Response:
        document = await request.json()
        try:
            kubernetes_validate.validate(document, _VERSION, strict=True)
        except kubernetes_validate.ValidationError as error:
            return _status(422, str(error))
        self.jobs[document["metadata"]["name"]] = document
        for index in range(document["spec"]["completions"]):
            self._create_pod(document, index)
        return web.json_response(document, status=201)

    def _create_pod(self, job: dict[str, Any], index: int) -> None:
        name = f"{job['metadata']['name']}-{index}-{next(self._numbers):05}"
        template = json.loads(json.dumps(job["spec"]["template"]))
        metadata = template["metadata"] | {
            "name": name,
            "annotations": {_INDEX: str(index)},
            "creationTimestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        metadata["labels"] |= {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
        container = template["spec"]["containers"][0]
        document = {"metadata": metadata, "spec": template["spec"]}
        pod = Pod(document, job["metadata"]["name"], self.folder / name)
        if container.get("resources", {}).get("limits", {}).get("nvidia.com/gpu"):
            why = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu. No victims."
            condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
            document["status"] = {"phase": "Pending", "conditions": [condition | {"message": why}]}
        elif container["image"].startswith("missing"):
            waiting = {"reason": "ErrImagePull", "message": f"{container['image']}: not found"}
            document["status"] = {
                "phase": "Pending",
                "containerStatuses": [{"state": {"waiting": waiting}}],
            }
        else:
            pod.folder.mkdir()
            command = container["command"]
            assert _SECOND in command[-1]
            (pod.folder / "second").write_text("1")
            command = [*command[:-1], command[-1].replace(_SECOND, _OF_FILE)]
            pod.process = subprocess.Popen(
                command, env=pod.environment, cwd=pod.folder, start_new_session=True
            )
            document["status"] = {"phase": "Running"}
        self.pods[name] = pod

    async def _list_pods(self, request: web.Request) -> web.Response:
        key, _, value = request.query["labelSelector"].partition("=")
        found = [pod.document for pod in self.pods.values()]
        items = [one for one in found if one["metadata"]["labels"].get(key) == value]
        return web.json_response({"kind": "PodList", "apiVersion": "v1", "items": items})

    async def _delete_job(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in self.jobs:
            return _status(404, f'jobs.batch "{name}" not found')
        self._tasks.append(asyncio.ensure_future(self._end(name)))
        return _status(200, "")

    async def _end_finished_jobs(self) -> None:
        """Delete each Job whose pods have all ended well, as its `ttlSecondsAfterFinished` asks."""
        while True:
            for job in list(self.jobs):
                mine = [pod for pod in self.pods.values() if pod.job == job]
                if all(pod.process is not None and pod.process.poll() == 0 for pod in mine):
                    await self._end(job)
            await asyncio.sleep(0.1)

    async def _end(self, job: str) -> None:
        """End a Job with its pods."""
        self.jobs.pop(job, None)
        mine = [name for name, pod in self.pods.items() if pod.job == job]
        for name in mine:
            self._tell_to_leave(self.pods[name])
        await asyncio.gather(*(self._remove(name, _GRACE_S) for name in mine))

    def _tell_to_leave(self, pod: Pod) -> None:
        pod.document["metadata"]["deletionTimestamp"] = "now"
        if pod.process is not None:
            pod.process.terminate()

    async def _remove(self, name: str, grace_s: float) -> None:
        """End a pod as a kubelet does: process 1 has been told, then all of it is killed."""
        deadline = time.monotonic() + grace_s
        pod = self.pods[name]
        while pod.process is not None and pod.process.poll() is None:
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(0.05)
        self._kill(pod)
        self.pods.pop(name, None)

    def _kill(self, pod: Pod) -> None:
        if pod.process is not None:
            _kill_session(pod.process.pid)
            pod.process.wait(10)
        for process in pod.execs:
            _kill_session(process.pid)

    async def _exec(self, request: web.Request) -> web.StreamResponse:
        """Run a command in a pod; a frame's first byte is its channel (`v4.channel.k8s.io`)."""
        pod = self.pods[request.match_info["name"]]
        socket = web.WebSocketResponse(protocols=("v4.channel.k8s.io",))
        await socket.prepare(request)
        process = await asyncio.create_subprocess_exec(
            *request.query.getall("command"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=pod.environment,
            cwd=pod.folder,
            start_new_session=True,
        )
        pod.execs.append(process)
        assert process.stdin is not None
        pumps = [
            asyncio.ensure_future(_pump(socket, channel, stream))
            for channel, stream in ((b"\1", process.stdout), (b"\2", process.stderr))
        ]
        ended = asyncio.ensure_future(_tell_end(socket, process, pumps))
        async for message in socket:
            if message.type == WSMsgType.BINARY and message.data[:1] == b"\0":
                process.stdin.write(message.data[1:])
        process.stdin.close()  # the client is gone: its end of the stream is
        await ended
        return socket


async def _pump(socket: web.WebSocketResponse, channel: bytes, stream: Any) -> None:
    while data := await stream.read(1 << 15):
        if not socket.closed:
            await socket.send_bytes(channel + data)


async def _tell_end(
    socket: web.WebSocketResponse, process: asyncio.subprocess.Process, pumps: list[Any]
) -> None:
    status = await process.wait()
    await asyncio.gather(*pumps, return_exceptions=True)
    told: dict[str, Any] = {"status": "Success"}
    if status:
        cause = {"reason": "ExitCode", "message": str(status if status > 0 else 128 - status)}
        told = {"status": "Failure", "details": {"causes": [cause]}}
    if not socket.closed:
        await socket.send_bytes(b"\3" + json.dumps(told).encode())
        await socket.close()


def _status(code: int, message: str) -> web.Response:
    success = "Success" if code == 200 else "Failure"
    document = {"kind": "Status", "status": success, "message": message, "code": code}
    return web.json_response(document, status=code)


def _kill_session(leader: int) -> None:
    """Kill what a container's end would: every process of the session, and those they started."""
    import psutil

    try:
        family = [psutil.Process(leader), *psutil.Process(leader).children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in family:
        try:
            process.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
