"""What a checkpoint says of itself, and which of several stay. Pure: plain values."""

import json
import math
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

FORMAT = 1
_STEP = re.compile(r"step-(\d{8,})(?:-(\d+))?")


@dataclass(frozen=True, slots=True)
class Manifest:
    """What `checkpoint.json` says.

    Attributes:
        step: Steps of the training's optimizer.
        saved_at: Seconds since 1970.
        world_size: Ranks that saved it.
        layouts: Of each model, by name.
        files: Size and CRC-32 of each file, by name.
        metric: What it was saved with, lower being better; None where nothing was given.
        nbdist: The version that wrote it.
        torch: The version of torch that wrote it.
        format: Of the folder.
        is_automatic: Whether a cell saved it by itself.
        holds: What is in it, in words, as `rest.holds`; nothing in older ones.
    """

    step: int
    saved_at: float
    world_size: int
    layouts: Mapping[str, str]
    files: Mapping[str, tuple[int, int]]
    metric: float | None = None
    nbdist: str = ""
    torch: str = ""
    format: int = FORMAT
    is_automatic: bool = False
    holds: Mapping[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(size for size, _ in self.files.values())

    def to_json(self) -> str:
        """Return the text of the file."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        files = {name: list(facts) for name, facts in self.files.items()}
        content = {**fields, "files": files}
        return json.dumps({**content, "crc": _crc_of(content)}, indent=1)

    @classmethod
    def from_json(cls, text: str | bytes) -> "Manifest":
        """Return what `to_json` wrote.

        Raises:
            ValueError, KeyError, TypeError: It is not such a text.
        """
        content = json.loads(text)
        if content["format"] != FORMAT:  # of a newer one nothing else is known
            return cls(
                0, 0.0, 0, {}, {}, None, str(content.get("nbdist", "")), "", content["format"]
            )
        if content.pop("crc") != _crc_of(content):
            raise ValueError("it has another checksum than when it was written")
        files = {name: (int(size), int(crc)) for name, (size, crc) in content["files"].items()}
        return cls(**{**content, "files": files})


def order(name: str) -> tuple[int, int] | None:
    """Return (step, how often it had been saved before) of a folder's name; None: not one."""
    match = _STEP.fullmatch(name)
    return (int(match[1]), int(match[2] or 1)) if match else None


def name_of(step: int, taken: Iterable[str]) -> str:
    """Return the name of the folder of a step, which none of those has that are there."""
    base = f"step-{step:08d}"
    names, count = set(taken), 2
    if base not in names:
        return base
    while f"{base}-{count}" in names:
        count += 1
    return f"{base}-{count}"


def to_delete(
    committed: Mapping[str, Manifest], keep: int | None, best: str | None, newest: str
) -> list[str]:
    """Return the checkpoints that are one too many.

    Args:
        committed: Those of this place, by name.
        keep: How many of the newest stay; None keeps all.
        best: One that stays, too.
        newest: One that stays, whatever its step: training may have gone back.

    What another version has written stays as well: nothing is known of it.
    """
    if keep is None:
        return []
    ours = [name for name, commit in committed.items() if commit.format == FORMAT]
    by_age = sorted(ours, key=lambda name: (committed[name].saved_at, order(name)))
    stay = {*by_age[-max(1, keep) :], newest, best}
    return [name for name in by_age if name not in stay]


def best_of(committed: Mapping[str, Manifest]) -> str | None:
    """Return the checkpoint with the lowest metric, the newest of several; None without any."""
    rated = [
        (commit.metric, -commit.saved_at, name)
        for name, commit in committed.items()
        if commit.metric is not None and not math.isnan(commit.metric)
    ]
    return min(rated)[2] if rated else None


def _crc_of(content: Mapping[str, Any]) -> int:
    """Return the checksum of a commit's fields."""
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
