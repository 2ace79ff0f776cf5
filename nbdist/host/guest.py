"""A parent that a keeper has started, maybe on another host: who it is, and how it is reached.

On another host, its files are in a private folder (0700) of `$TMPDIR`, which goes with it: always
the keys, and the logs but where a token proves that the notebook's folder is shared.

    {"op": "hello", "host": ..., "environment": {}, "logs": ..., "token": ...}
    {"op": "listen"}
    {"op": "reach", "targets": {HOST: [[ADDRESS, PORT], ...]}, "within_s": ...}

are answered by the events `hello` (`host/facts.py`), `listening` (ports) and `reached` (addresses).
"""

import json
import os
import shutil
import socket
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from nbdist.host import facts, reach
from nbdist.host.link import JsonLines
from nbdist.shared.placement import HERE, TOKEN

BEAT_S: Final = 1.0  # between two beats, in either direction
LEASE_S: Final = 10.0  # without a beat of the keeper, after which all ends here

_TAIL_BYTES: Final = 32 * 1024


class Guest:
    """What a parent knows of its host, and of the keeper at the other end."""

    def __init__(self, link: JsonLines) -> None:
        """Begin before the keeper has said hello."""
        self.host = ""
        self._link = link
        self._folder: Path | None = None  # None on the notebook's machine
        self._cluster = ""  # the name of its folder of logs on the notebook's
        self._keeps_logs = False
        self._listeners: list[socket.socket] = []
        self._heard_at = self._beat_at = time.monotonic()

    def own(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return those requests that are for this host; any proves that the keeper lives."""
        self._heard_at = time.monotonic()
        if not self.host:  # no keeper has said hello yet
            return requests
        return [one for one in requests if one.get("host", self.host) in (self.host, "")]

    def beat(self) -> bool:
        """Tell the keeper that this host lives; return whether the keeper does."""
        now = time.monotonic()
        if now - self._beat_at >= BEAT_S / 2:
            self._beat_at = now
            self._link.send(event="beat", host=self.host)
        return now - self._heard_at < LEASE_S

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the event that answers a `hello`, `listen` or `reach`."""
        if request["op"] == "hello":
            return self._greet(request)
        if request["op"] == "listen":
            self._listeners, ports = reach.listen(facts.addresses())
            return {"event": "listening", "ports": ports}
        reached = reach.connect(request["targets"], request["within_s"])
        return {"event": "reached", "addresses": reached}

    def stop_listening(self) -> None:
        """Close what `listen` has opened: every host has tried it."""
        for listener in self._listeners:
            listener.close()
        self._listeners = []

    def prepare(self, role: str, spec: dict[str, Any], log: str) -> tuple[dict[str, Any], str]:
        """Return what a process is told, and its log, with files of this host; any role."""
        self.stop_listening()
        if self._folder is None or role != "engine":
            return {k: v for k, v in spec.items() if k != "connection"}, log
        file, draft = self._folder / "engine.json", self._folder / ".engine.json"
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as opened:
            json.dump(spec.pop("connection"), opened)
        os.replace(draft, file)  # a rank that was started before may be reading it
        own = {"connection_file": str(file), "profile_dir": str(self._folder)}
        if not self._keeps_logs:
            return spec | own, log
        logs = self._folder / "logs" / self._cluster
        own |= {"output_folder": str(logs), "logs_on": self.host}
        return spec | own, str(logs / Path(log).name)

    def last_words(self, key: str) -> dict[str, str]:
        """Return the ends of a rank's files, by name, where the kernel cannot read them."""
        if self._folder is None or not self._keeps_logs or not key.startswith("rank "):
            return {}
        name = key.replace(" ", "-")
        logs = self._folder / "logs" / self._cluster
        return {"log": _tail(logs / f"{name}.log"), "stderr": _tail(logs / f"{name}.stderr")}

    def remove_folder(self) -> None:
        """Remove this host's private folder."""
        self.stop_listening()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _greet(self, request: dict[str, Any]) -> dict[str, Any]:
        self.host = request["host"] or socket.gethostname()
        os.environ.update(request["environment"])
        trouble = ""
        logs = Path(request["logs"])
        self._cluster = logs.name  # the same on all hosts: ranks' journals go by it
        # A folder that is shared may be mounted read-only here.
        is_shared = _reads(logs / TOKEN) == request["token"] and os.access(logs, os.W_OK)
        self._keeps_logs = not is_shared
        if self.host != HERE:
            try:
                self._folder = _make_folder(self._cluster)
            except OSError as error:
                trouble = f"no folder for logs in {_temporary()}: {error.strerror}"
        own = facts.of_this_host()
        return {"event": "hello", **own, "trouble": trouble}


def _temporary() -> str:
    """Return where temporary files belong: `tempfile` would look elsewhere on a full disk."""
    return os.environ.get("TMPDIR") or "/tmp"


def _make_folder(cluster: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="nbdist-", dir=_temporary()))
    # As below `.nbdist`, so that what lies beside the logs of a cluster does so here.
    logs = folder / "logs"
    logs.mkdir(mode=0o700)
    (logs / cluster).mkdir(mode=0o700)
    probe = folder / "probe"
    probe.write_bytes(b"\0" * _TAIL_BYTES)  # a disk that is full lets folders be made
    probe.unlink()
    return folder


def _reads(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, ValueError):
        return ""


def _tail(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            opened.seek(max(0, opened.seek(0, 2) - _TAIL_BYTES))
            return opened.read().decode(errors="replace")
    except OSError:
        return ""
