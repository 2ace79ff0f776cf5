"""Where checkpoints lie, and which of them counts.

    NAME/                       `.nbdist/checkpoints/NOTEBOOK`, a path, or any URL of fsspec
      latest, best              the name of a folder below; written last, in one piece
      step-00000100/
        __0_0.distcp ...        tensors, a file a rank; .metadata says which is where
        training.pt             what is small: options, schedulers, loaders
        checkpoint.json         the commit: every file with its size and checksum
        writing.json            who writes; gone with the commit, as is claim-... in object stores

A folder without `checkpoint.json` is no checkpoint: its save was interrupted. None is ever written
into twice. Any thread; no torch.
"""

import contextlib
import errno
import json
import os
import random
import shutil
import socket
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal
from urllib.parse import urlsplit

import psutil

from nbdist.engine.checkpoint.manifest import Manifest, order
from nbdist.shared.errors import CheckpointError, UsageError
from nbdist.shared.text import name_bytes

COMMIT, WRITING, TRAINING = "checkpoint.json", "writing.json", "training.pt"
CLAIM, CLAIM_ATTEMPTS = "claim-", 6
_CHUNK = 8 << 20
_PAUSE_S = 0.1  # between the first two claims of a folder; each next is up to twice as long
Syncs = Literal["none", "file", "folder"]
_ANSWER_S = 30.0  # within which a server says what there is
_ABANDONED_S = 24 * 3600.0  # after which a save on another host has surely ended
# A server that does not answer is told of in seconds; by themselves these libraries take minutes.
# Files have checksums of ours; those of S3 are wrong for parts of a file on some servers.
_OPTIONS = {
    "s3": {
        "config_kwargs": {
            "connect_timeout": 5,
            "read_timeout": 60,
            "retries": {"max_attempts": 2, "mode": "standard"},
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
        }
    }
}


@dataclass(frozen=True, slots=True)
class Damage:
    """What is wrong with a checkpoint's files, in words."""

    found: tuple[str, ...] = field(default=())


class CheckpointFolder:
    """The checkpoints of one name.

    Args:
        url: A path, or a URL such as `s3://bucket/run`.
        options: For the library behind the URL, as fsspec takes them.
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        protocol = urlsplit(url).scheme if "://" in url else "file"
        if "://" in url and urlsplit(url).password:  # URLs are printed and logged
            raise UsageError(
                f"A URL with a password in it ({protocol}://...) would be shown with it.",
                do="leave it out of the URL, and pass it in storage_options",
            )
        if protocol == "memory":
            raise UsageError(
                f"{url} is the memory of one process, and ranks are several.",
                do="give a folder, or the URL of a server",
            )
        self.asked = url
        self.is_local = protocol in ("file", "local")
        self.url = os.path.abspath(_path_of(url)) if self.is_local else url.rstrip("/")
        self.options = _merged(_OPTIONS.get(protocol, {}), options or {})
        self._fs, self._root = _open(self.url, self.options)
        is_waited_for = getattr(self._fs, "async_impl", False)  # its library takes a timeout
        self._claimed = ""  # the file by which the folder that is being written is ours
        self._limit = {"timeout": _ANSWER_S} if is_waited_for else {}

    def folder(self, name: str) -> str:
        """Return the URL of one checkpoint."""
        return f"{self.url}/{name}"

    def names(self) -> list[str]:
        """Return the folders there, complete or not, in the order of their steps."""
        self._fs.invalidate_cache()
        try:
            found = self._fs.ls(self._root, detail=False, **self._limit)
        except FileNotFoundError:
            return []
        names = (str(path).rstrip("/").rsplit("/", 1)[-1] for path in found)
        return sorted((n for n in names if order(n)), key=lambda name: order(name) or (0, 0))

    def committed(self) -> dict[str, Manifest]:
        """Return the checkpoints that count, in the order of their steps."""
        return self.survey()[0]

    def survey(self) -> tuple[dict[str, Manifest], list[str]]:
        """Return the checkpoints that count, and those whose commit is there and damaged."""
        found: dict[str, Manifest] = {}
        damaged = []
        for name in self.names():
            try:
                commit = self.commit_of(name)
            except ValueError:
                damaged.append(name)
                continue
            if commit is not None:
                found[name] = commit
        return found, damaged

    def commit_of(self, name: str) -> Manifest | None:
        """Return what a checkpoint says of itself; None: it is not complete.

        Raises:
            ValueError: It is not what was written.
        """
        try:
            return Manifest.from_json(self.read(name, COMMIT))
        except FileNotFoundError:
            return None
        except (KeyError, TypeError) as error:
            raise ValueError(f"it lacks {error}") from error

    def pointer(self, which: str) -> str | None:
        """Return the name that `latest` or `best` holds."""
        try:
            name = bytes(self._fs.cat_file(self._path(which))).decode(errors="replace").strip()
        except FileNotFoundError:
            return None
        return name if order(name) else None

    # -- writing

    def begin(self, name: str, nbytes: int) -> None:
        """Make a folder for a checkpoint of this size.

        Raises:
            CheckpointError: There is no room for it, or another process is making it.
            OSError: It cannot be made.
        """
        if self.is_local:
            try:
                os.makedirs(self.folder(name), mode=0o700)
            except FileExistsError as error:
                raise self._begun_elsewhere(name) from error
            free = shutil.disk_usage(self.url).free
            if nbytes > free:
                os.rmdir(self.folder(name))
                raise CheckpointError(
                    f"A checkpoint takes {name_bytes(nbytes)}, and {self.url} has "
                    f"{name_bytes(free)} left.",
                    do="make room, or give nbdist.save another folder",
                )
        elif not self._claim(name):
            raise self._begun_elsewhere(name)
        self._sign(name)

    def _claim(self, name: str) -> bool:
        """Return whether a folder that two may be making at once is ours."""
        claim = FolderClaim(
            partial(self._files, name),
            lambda file: self._fs.pipe_file(self._path(name, file), b"{}"),
            lambda file: self._fs.rm_file(self._path(name, file)),
        )
        self._claimed = claim.file
        return claim.take()

    def _begun_elsewhere(self, name: str) -> CheckpointError:
        return CheckpointError(
            f"{self.folder(name)} was begun by another process a moment ago.",
            why="another notebook saves to the same name",
            do="give each training a name of its own",
        )

    def write(self, name: str, file: str, content: bytes, syncs: Syncs = "file") -> tuple[int, int]:
        """Write a small file in one piece; returns its size and checksum.

        Its name outlasts a loss of power when that of the commit does, which is written later.
        """
        self._put(self._path(name, file), content, syncs)
        return len(content), zlib.crc32(content)

    def commit(self, name: str, commit: Manifest) -> None:
        """Have a checkpoint count, and be the newest."""
        self.write(name, COMMIT, commit.to_json().encode(), "folder")
        self._put(self._path("latest"), name.encode())
        for file in filter(None, (self._claimed, WRITING)):
            with contextlib.suppress(Exception):  # it counts all the same
                self._fs.rm_file(self._path(name, file))

    def point_to_best(self, name: str) -> None:
        """Have `best` hold a checkpoint's name."""
        if self.pointer("best") != name:
            self._put(self._path("best"), name.encode())

    def delete(self, name: str) -> None:
        """Delete a checkpoint, so that what is left of it, interrupted, is known to be left.

        Its commit goes first, for it must not look complete; who deletes it, last.
        """
        if COMMIT in self._files(name):
            self._sign(name)
            self._fs.rm_file(self._path(name, COMMIT))
        for file in self._files(name) - {WRITING}:
            path = self._path(name, file)
            self._fs.rm(path, recursive=self.is_local and os.path.isdir(path))
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name, WRITING))
        if self.is_local and os.path.isdir(self.folder(name)):
            os.rmdir(self.folder(name))

    def _files(self, name: str) -> set[str]:
        self._fs.invalidate_cache()
        try:
            paths = self._fs.ls(self._path(name), detail=False)
        except FileNotFoundError:
            return set()
        return {str(path).rstrip("/").rsplit("/", 1)[-1] for path in paths}

    def delete_interrupted(self, running: str) -> list[str]:
        """Delete what saves have left behind that run no more; return names."""
        found, damaged = self.survey()
        gone = [
            name
            for name in self.names()
            if name not in (*found, *damaged, running) and self._is_left(name)
        ]
        for name in gone:
            self.delete(name)
        return gone

    def _sign(self, name: str) -> None:
        """Write who works on a folder."""
        who = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "since": _started(os.getpid()),
            "at": time.time(),
        }
        self.write(name, WRITING, json.dumps(who).encode(), "none")

    def _is_left(self, name: str) -> bool:
        """Return whether no process works any more on a folder that is no checkpoint."""
        try:
            who = json.loads(self.read(name, WRITING))
        except FileNotFoundError:
            return self._is_bare(name)
        except ValueError:
            return False  # its owner is not known
        if who["host"] != socket.gethostname():
            return time.time() > float(who["at"]) + _ABANDONED_S
        # A process saves one at a time: another of its own is a deletion that failed.
        pid = int(who["pid"])
        return pid == os.getpid() or _started(pid) != float(who["since"])

    def _is_bare(self, name: str) -> bool:
        """Return whether a folder is empty: its save was ended before it wrote who it is.

        One that is about to be written into is made again by its first file.
        """
        return self.is_local and set(os.listdir(self.folder(name))) <= {f"{WRITING}.tmp"}

    # -- reading

    def read(self, name: str, file: str) -> bytes:
        """Return a small file."""
        return bytes(self._fs.cat_file(self._path(name, file)))

    def damage(self, name: str, commit: Manifest, files: Iterable[str]) -> Damage:
        """Read files whole, and return what is wrong with them."""
        return Damage(tuple(w for f in files if (w := self._wrong(name, f, *commit.files[f]))))

    def _wrong(self, name: str, file: str, size: int, crc: int) -> str:
        found_size = found_crc = 0
        try:
            with self._fs.open(self._path(name, file), "rb") as stream:
                while chunk := stream.read(_CHUNK):
                    found_size += len(chunk)
                    found_crc = zlib.crc32(chunk, found_crc)
        except FileNotFoundError:
            return f"{file} is missing"
        if found_size != size:
            return f"{file} has {found_size:,} of {size:,} bytes"
        return "" if found_crc == crc else f"{file} has another checksum than when it was written"

    # -- files

    def _path(self, *names: str) -> str:
        return "/".join([self._root.rstrip("/"), *names])

    def _put(self, path: str, content: bytes, syncs: Syncs = "folder") -> None:
        """Write a file so that it is there whole or not at all.

        Args:
            path: The file.
            content: All of it.
            syncs: Whether it must outlast a loss of power: the "file", with its name ("folder"),
                or "none" of it. On a disk each takes milliseconds.
        """
        if not self.is_local:
            self._fs.pipe_file(path, content)
            return
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        with open(f"{path}.tmp", "wb") as stream:
            stream.write(content)
            stream.flush()
            if syncs != "none":
                os.fsync(stream.fileno())
        os.replace(f"{path}.tmp", path)
        if syncs != "folder":
            return
        parent = os.open(os.path.dirname(path), os.O_RDONLY)
        try:
            os.fsync(parent)
        finally:
            os.close(parent)


def reason(error: BaseException, url: str) -> CheckpointError:
    """Return an error of files in words that tell what to do."""
    if isinstance(error, CheckpointError):
        return error
    number = getattr(error, "errno", None)
    if number in (errno.ENOSPC, errno.EDQUOT):
        return CheckpointError(
            f"The disk is full: {url} could not be written.",
            do="make room, or give nbdist.save another folder",
        )
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return CheckpointError(
            f"{url} may not be written or read: {error.strerror}.",  # type: ignore[attr-defined]
            do="give a folder of your own, or change its rights",
        )
    if isinstance(error, TimeoutError):
        return CheckpointError(
            f"{url} does not answer.", do="try it again, or give nbdist another folder"
        )
    first = str(error).strip().splitlines()[:1]
    is_missing = isinstance(error, FileNotFoundError)
    return CheckpointError(
        f"{url} could not be reached or used.",
        why=f"{type(error).__name__}: {first[0] if first else 'without a text'}",
        do="give a folder that is there; ranks on several hosts need one that all of them see"
        if is_missing
        else "try it again, or give nbdist another folder",
    )


def _open(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    import fsspec  # type: ignore[import-untyped]

    try:
        return fsspec.core.url_to_fs(url, **options)  # type: ignore[no-any-return]
    except (ImportError, ValueError) as error:
        raise CheckpointError(
            f"{url} cannot be opened.",
            why=str(error),
            do="install fsspec's package for it (s3fs, gcsfs, adlfs) where the ranks run",
        ) from error
    except Exception as error:  # some libraries connect at once
        raise reason(error, url) from error


def _merged(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a library's options, theirs before ours, also those inside of one."""
    both = {
        name: {**ours[name], **theirs[name]}
        for name in ours.keys() & theirs.keys()
        if isinstance(ours[name], Mapping) and isinstance(theirs[name], Mapping)
    }
    return {**ours, **theirs, **both}


def _path_of(url: str) -> str:
    return os.path.expanduser(url.partition("://")[2] if "://" in url else url)


def _started(pid: int) -> float:
    """Return when a process was started; 0 where there is none, or it has ended."""
    try:
        process = psutil.Process(pid)
        return 0.0 if process.status() == psutil.STATUS_ZOMBIE else float(process.create_time())
    except psutil.NoSuchProcess:
        return 0.0


class FolderClaim:
    """One save's claim of a folder in an object store, which makes no folder for one alone.

    Two saves that are begun at once would mix their files. So each writes a file of its own there
    and lists the folder: with anything else in it, it withdraws. Whoever writes later lists later,
    so of two at least one sees the other. Where both do, both withdraw and try again, each a random
    while later. Main thread of rank 0.

    Args:
        files: Returns the names of the files there.
        put: Writes an empty file of this name.
        remove: Deletes it.
    """

    def __init__(
        self,
        files: Callable[[], set[str]],
        put: Callable[[str], None],
        remove: Callable[[str], None],
    ) -> None:
        self.file = f"{CLAIM}{uuid.uuid4().hex}"
        self._files, self._put, self._remove = files, put, remove

    def stake(self) -> None:
        """Say that the folder is claimed."""
        self._put(self.file)

    def is_alone(self) -> bool:
        """Return whether no other process has claimed or used the folder."""
        return self._files() <= {self.file}

    def withdraw(self) -> None:
        """Say so no longer."""
        self._remove(self.file)

    def take(self, pause: Callable[[float], None] = time.sleep) -> bool:
        """Return whether the folder is this save's; else nothing of it is left there."""
        for attempt in range(CLAIM_ATTEMPTS):
            self.stake()
            if self.is_alone():
                return True
            self.withdraw()
            if any(not name.startswith(CLAIM) for name in self._files()):
                return False
            pause(random.uniform(0, _PAUSE_S * 2**attempt))
        return False
