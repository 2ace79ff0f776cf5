"""A finished board's scene as bytes, and back: any of its views is drawn again from them.

Gzipped JSON of the scene's fields, for it must be safe to read and outlive versions: a field
that is unknown is passed over, one that is missing takes its default. Arrays are exact. Histories
are thinned as those in memory are (`telemetry.thin`), until all of it is small; at last the parts
over the steps are left out. Pure.
"""

import dataclasses
import functools
import gzip
import json
import types
import typing
import zlib
from array import array
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from nbdist.client.board.scales import Floats
from nbdist.client.board.scene.lanes import telling_lanes
from nbdist.client.board.scene.scene import Curve, Panel, Scene
from nbdist.client.metrics.analysis.values import RECENT, TimeLine, TimelineLane
from nbdist.client.metrics.telemetry import thin
from nbdist.shared.packed import numbers_of, text_of

VERSION = 1
MOST_BYTES = 300_000
MOST_POINTS = 2000  # of a line
MOST_IN_ALL = 24_000  # points of all lines; 16 bytes each before they are packed
_LEAST_POINTS = 2 * RECENT
_CLASSES = {float: (float, int)}  # what JSON has for them
_MOST_READ = 20_000_000  # bytes of JSON: a file that was changed must not fill the memory


def to_bytes(scene: Scene) -> bytes | None:
    """Return a scene as bytes, at most `MOST_BYTES`; None where it cannot be made so small."""
    lines = sum(len(panel.lines) for panel in _panels(scene))
    most = max(_LEAST_POINTS, min(MOST_POINTS, MOST_IN_ALL // max(1, lines)))
    while True:
        content = {"version": VERSION, "scene": _plain(_thinned(scene, most))}
        packed = gzip.compress(json.dumps(content, separators=(",", ":")).encode(), 6, mtime=0)
        if len(packed) <= MOST_BYTES:
            return packed
        if most > _LEAST_POINTS:
            most = max(_LEAST_POINTS, most // 2)
        elif scene.history:
            scene = replace(scene, history=())  # its panels are stacked, and cannot be thinned each
        else:
            return None


def from_bytes(data: bytes) -> Scene:
    """Return the scene that `to_bytes` was given.

    Raises:
        ValueError: It is of a later version, or damaged.
    """
    try:
        content = json.loads(zlib.decompressobj(31).decompress(data, _MOST_READ))
        if content["version"] != VERSION:
            raise ValueError(f"version {content['version']}")
        scene: Scene = _typed(Scene, content["scene"])
    except (zlib.error, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    return scene


def _panels(scene: Scene) -> list[Panel]:
    more = [panel for panel in (scene.paces, scene.norm) if panel is not None]
    return [*scene.panels, *scene.devices, *more]


def _thinned(scene: Scene, most: int) -> Scene:
    """Return a scene whose lines have at most `most` points; what no view shows is left out."""
    recent = {
        rank: replace(steps, times_ms=steps.times_ms[-RECENT:])
        for rank, steps in scene.recent.items()
    }
    return replace(
        scene,
        recent=recent,
        analysis=replace(scene.analysis, line=_seen(scene)),
        panels=tuple(_thin(panel, most) for panel in scene.panels),
        paces=scene.paces and _thin(scene.paces, most),
        norm=scene.norm and _thin(scene.norm, most),
        devices=tuple(_thin(panel, most) for panel in scene.devices),
    )


def _seen(scene: Scene) -> TimeLine | None:
    """Return the time line with the lanes that are shown; the others only count."""
    line = scene.analysis.line
    if line is None:
        return None
    seen = {lane.rank for lane in telling_lanes(scene)}
    lanes = (lane if lane.rank in seen else TimelineLane(lane.rank, (), ()) for lane in line.lanes)
    return replace(line, lanes=tuple(lanes))


def _thin(panel: Panel, most: int) -> Panel:
    """Return a panel of fewer points; the last ones, which tables are about, are all kept."""
    lines = []
    for line in panel.lines:
        x, y, of = line.x, line.y, line.of
        if len(y) > most:
            of = of or len(y)
            old_x, old_y = (array("d", part[:-RECENT].tobytes()) for part in (x, y))
            while len(old_y) > most - RECENT:
                old_x, old_y = thin(old_x, old_y)
            x, y = np.append(old_x, x[-RECENT:]), np.append(old_y, y[-RECENT:])
        lines.append(Curve(line.rank, x, y, of))
    return replace(panel, lines=tuple(lines))


def _plain(value: Any) -> Any:
    """Return a value of a scene as JSON has it."""
    if isinstance(value, np.ndarray):
        return _packed(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return [[_plain(key), _plain(item)] for key, item in value.items()]
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def _packed(numbers: Floats) -> dict[str, str]:
    """Return numbers as text: in half the bytes where these hold them exactly."""
    with np.errstate(over="ignore"):
        halves = numbers.astype(np.float32)
    code = "f" if np.array_equal(halves.astype(np.float64), numbers, equal_nan=True) else "d"
    return {code: text_of(array(code, numbers.tolist()))}


def _typed(kind: Any, value: Any) -> Any:
    """Return a value of JSON as the field of type `kind` that it was.

    Raises:
        ValueError: It is none.
    """
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        assert isinstance(kind, type)
        hints = _hints(kind).items()
        return kind(**{name: _typed(hint, value[name]) for name, hint in hints if name in value})
    if origin is np.ndarray:
        ((code, text),) = value.items()
        if code not in ("f", "d"):
            raise ValueError(f"an array of {code!r}")
        return np.array(numbers_of(text, code), dtype=np.float64)
    if origin in (types.UnionType, typing.Union):
        (whole,) = (part for part in parts if part is not types.NoneType)
        return None if value is None else _typed(whole, value)
    if origin is tuple:
        kinds = [parts[0]] * len(value) if parts[-1] is Ellipsis else parts
        return tuple(_typed(part, item) for part, item in zip(kinds, value, strict=True))
    if origin is Mapping:
        return {_typed(parts[0], key): _typed(parts[1], item) for key, item in value}
    is_right = value in parts if parts else isinstance(value, _CLASSES.get(kind, kind))
    if not is_right:
        raise ValueError(f"{value!r} is no {kind}")
    return value


@functools.cache
def _hints(kind: type) -> Mapping[str, Any]:
    return typing.get_type_hints(kind)
