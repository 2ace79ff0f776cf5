"""What a browser does with a hub: `python hub_client.py URL start | run | stop`, in a test host.

Needs what a hub's environment has. `run` reads cells from its input, a JSON list, runs them in a
new kernel of the user's server, and prints a JSON list of their texts; the kernel stays.
"""

import asyncio
import json
import sys
import uuid
from typing import Any

from tornado.httpclient import AsyncHTTPClient, HTTPRequest
from tornado.websocket import WebSocketClientConnection, websocket_connect

USER = "root"
TOKEN = "of-the-test"
_HEADERS = {"Authorization": f"token {TOKEN}"}
_WAIT_S = 120.0


async def start(hub: str) -> None:
    """Ask the hub for the user's server, and wait until it answers."""
    await _ask("POST", f"{hub}/hub/api/users/{USER}/server", "{}")
    answer = await _ask("GET", f"{hub}/hub/api/users/{USER}/server/progress")
    events = [json.loads(line[5:]) for line in answer.splitlines() if line.startswith("data:")]
    if not events[-1].get("ready"):
        raise SystemExit(f"the server did not start: {events}")


async def stop(hub: str) -> None:
    """Have the hub end the server; it answers 202 while the job still ends."""
    await _ask("DELETE", f"{hub}/hub/api/users/{USER}/server")


async def run(hub: str) -> None:
    """Run cells."""
    server = f"{hub}/user/{USER}/api/kernels"
    kernel = json.loads(await _ask("POST", server, json.dumps({"name": "nbdist"})))["id"]
    address = f"{server}/{kernel}/channels".replace("http", "ws", 1)
    channels = await websocket_connect(HTTPRequest(address, headers=_HEADERS))
    print(json.dumps([await _run_cell(channels, cell) for cell in json.load(sys.stdin)]))
    channels.close()


async def _run_cell(channels: WebSocketClientConnection, cell: str) -> str:
    """Return what a cell prints, and its error."""
    ours = uuid.uuid4().hex
    header = {"msg_id": ours, "msg_type": "execute_request", "session": ours, "version": "5.3"}
    message = {
        "header": {**header, "username": USER, "date": "2000-01-01T00:00:00Z"},
        "parent_header": {},
        "metadata": {},
        "content": {"code": cell, "silent": False, "allow_stdin": False},
        "channel": "shell",
    }
    await channels.write_message(json.dumps(message))
    texts: dict[object, str] = {}  # what is shown is replaced when it is updated
    while True:
        said = await asyncio.wait_for(channels.read_message(), _WAIT_S)
        if said is None:
            raise SystemExit(f"the kernel is gone; cell: {cell}; so far: {texts}")
        if isinstance(said, str) and _hear(json.loads(said), ours, texts):
            return "".join(texts.values())


def _hear(message: dict[str, Any], ours: str, texts: dict[object, str]) -> bool:
    """Take a message of a kernel; return whether the cell has ended."""
    if message["parent_header"].get("msg_id") != ours:
        return False
    content = message["content"]
    place = content.get("transient", {}).get("display_id", len(texts))
    match message["msg_type"]:
        case "stream":
            texts[place] = content["text"]
        case "error":
            texts[place] = "\n".join(content["traceback"])
        case "display_data" | "update_display_data" | "execute_result":
            texts[place] = content["data"].get("text/plain", "") + "\n"
    return message["msg_type"] == "status" and content["execution_state"] == "idle"


async def _ask(method: str, url: str, body: str | None = None) -> str:
    request = HTTPRequest(url, method, _HEADERS, body=body, request_timeout=_WAIT_S)
    answer = await AsyncHTTPClient().fetch(request, raise_error=False)
    text = answer.body.decode()
    if answer.code >= 300:
        raise SystemExit(f"{method} {url}: {answer.code} {text}")
    return text


if __name__ == "__main__":
    asyncio.run({"start": start, "run": run, "stop": stop}[sys.argv[2]](sys.argv[1]))
