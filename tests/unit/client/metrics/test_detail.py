"""What thinning takes from memory is found again, bounded, and what is lost is said."""

import math
import os
import random
import threading
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pytest

from nbdist.client.metrics import detail as detail_module
from nbdist.client.metrics.detail import NOT_KEPT, Detail, Part
from nbdist.client.metrics.telemetry import MAX_POINTS, History

ENOUGH = 4000
Floats: TypeAlias = "Sequence[float] | array[float] | npt.NDArray[np.float64]"


def written() -> None:
    """Wait until all that was handed over lies on the disk."""
    for thread in threading.enumerate():
        if thread.name == "nbdist-detail":
            thread.join(30)
            assert not thread.is_alive()


@pytest.fixture(autouse=True)
def _ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detail_module, "LINGER_S", 0.0)


def noise(n: int) -> "npt.NDArray[np.float64]":
    return np.random.default_rng(n).normal(size=n)


def float32(values: Floats) -> "npt.NDArray[np.float32]":
    """Return numbers in the digits that a page has."""
    return np.array(values, np.float32)


def filled(history: History, steps: Floats, values: Floats, size: int = 500) -> History:
    """Give a history its points as they come, some at a time."""
    steps, values = list(steps), list(values)
    for at in range(0, len(steps), size):
        history.extend(steps[at : at + size], values[at : at + size])
    return history


def assert_are(part: Part, steps: Floats, values: Floats) -> None:
    """Check that a part has just these points, in the digits of float32."""
    assert part.lost == ""
    assert np.array_equal(part.steps, steps)
    assert np.array_equal(float32(part.values), float32(values), equal_nan=True)


def test_any_range_of_a_million_steps_has_the_original_numbers(tmp_path: Path) -> None:
    values, steps = noise(1_000_000), np.arange(1.0, 1_000_001)
    history = filled(History(detail=Detail(tmp_path)), steps, values)

    series = history.snapshot()
    assert series.n < MAX_POINTS, "what is in memory is bounded"
    written()
    for low, high in ((1, 900), (499_990, 500_400), (700_000.5, 701_999.5), (999_000, 1_000_000)):
        at = slice(math.ceil(low) - 1, math.floor(high))
        assert_are(history.between(low, high, ENOUGH), steps[at], values[at])
    assert_are(history.between(0, 2e6, 10**9), steps, values)
    assert len(history.between(0, 2e6, ENOUGH).steps) == series.n, "that many are not read at all"


def test_what_waits_for_the_disk_is_found_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    at_once = os.pwrite

    def slow(file: int, data: memoryview, place: int) -> int:
        goes_on.wait(30)
        return at_once(file, data, place)

    monkeypatch.setattr(os, "pwrite", slow)
    values, steps = noise(60_000), np.arange(60_000.0)
    history = filled(History(detail=Detail(tmp_path)), steps, values)

    before = history.between(100, 200, ENOUGH)
    goes_on.set()
    written()

    assert_are(before, steps[100:201], values[100:201])
    assert history.between(100, 200, ENOUGH) == before


def test_steps_that_are_not_equal_and_values_that_are_not_finite_come_back(tmp_path: Path) -> None:
    draw, values = random.Random(3), noise(50_000)
    steps = np.cumsum([draw.choice((0, 1, 7)) for _ in values]).astype(float)  # some have two
    values[::1000], values[1::1000] = math.nan, math.inf
    history = filled(History(detail=Detail(tmp_path)), steps, values)
    written()

    at = (steps >= 20_000) & (steps <= 21_000)
    assert_are(history.between(20_000, 21_000, ENOUGH), steps[at], values[at])


def test_what_came_late_is_found_at_its_step(tmp_path: Path) -> None:
    values, steps = noise(60_000), np.arange(60_000.0)
    history, draw = History(detail=Detail(tmp_path)), random.Random(5)
    late = []
    for at in range(0, len(steps), 500):
        batch = list(steps[at : at + 500]), list(values[at : at + 500])
        if draw.random() < 0.2:
            late.append(batch)
        else:
            history.extend(*batch)
    for batch in late:
        history.extend(*batch)
    written()

    assert_are(history.between(0, 60_000, 10**9), steps, values)


def test_a_full_ring_keeps_the_newest_and_says_that_older_ones_are_lost(tmp_path: Path) -> None:
    values, steps = noise(200_000), np.arange(200_000.0)
    history = filled(History(detail=Detail(tmp_path, most_bytes=400_000)), steps, values)
    written()

    assert_are(history.between(150_000, 150_500, ENOUGH), steps[150_000:150_501],
               values[150_000:150_501])  # fmt: skip
    old = history.between(100, 9000, ENOUGH)
    assert old.lost == "of the rest the newest 0 MiB are kept"
    kept = history.snapshot()
    is_old = [100 <= step <= 9000 for step in kept.steps[: kept.n]]
    assert list(old.steps) == [s for s, is_one in zip(kept.steps, is_old, strict=False) if is_one]

    seam = history.between(0, 200_000, 10**9)
    assert seam.lost
    assert list(seam.steps) == sorted(set(seam.steps)), "no point twice where both meet"
    since = seam.lost_until + 1
    assert np.array_equal([s for s in seam.steps if s >= since], steps[int(since) :])
    (size,) = {os.stat(path).st_size for path in open_files(tmp_path)}
    assert size <= 400_000


def test_blocks_that_are_written_over_while_they_are_read_are_not_taken_for_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = noise(200_000)
    draw = random.Random(1)
    steps = np.cumsum([draw.choice((1, 2)) for _ in values]).astype(float)  # lie in the file, too
    history = History(detail=Detail(tmp_path, most_bytes=400_000))
    filled(history, steps[:40_000], values[:40_000])
    written()
    plain = os.pread
    rest = [(steps[40_000:], values[40_000:])]

    def read(*args: int) -> bytes:
        while rest:
            filled(history, *rest.pop())
            written()
        return plain(*args)

    monkeypatch.setattr(os, "pread", read)
    part = history.between(steps[0], steps[9000], 10**9)

    assert part.lost
    original = dict(zip(steps, float32(values), strict=True))
    assert part.steps
    for step, value in zip(part.steps, float32(part.values), strict=True):
        assert original[step] == value


def test_a_disk_that_fails_is_said_and_what_thinning_left_is_shown(tmp_path: Path) -> None:
    place = tmp_path / "folder"
    place.write_text("no folder")
    history = filled(History(detail=Detail(place)), range(50_000), [1.0] * 50_000)
    written()

    part = history.between(100, 5000, ENOUGH)

    assert part.lost == f"{NOT_KEPT}: File exists"
    assert 0 < len(part.steps) < 4901
    history.extend(range(50_000, 90_000), [2.0] * 40_000)
    assert history.snapshot().steps[-1] == 89_999


def test_a_disk_that_is_too_slow_holds_up_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr(os, "pwrite", lambda *_: 1 << goes_on.wait(30) * 40)
    monkeypatch.setattr(detail_module, "MOST_WAITING", 500_000)
    history = filled(History(detail=Detail(tmp_path)), range(300_000), [1.0] * 300_000)

    part = history.between(100, 5000, ENOUGH)

    goes_on.set()
    written()
    assert part.lost == f"{NOT_KEPT}: the disk is too slow"


def test_without_a_place_it_is_said_where_points_were_lost_and_only_there() -> None:
    history = filled(History(), range(25_000), [1.0] * 25_000)
    assert history.between(100, 900, ENOUGH).lost == NOT_KEPT
    assert history.between(24_000, 24_900, ENOUGH) == Part(
        array("d", range(24_000, 24_901)), array("d", [1.0] * 901)
    )


def test_a_line_that_is_never_thinned_touches_no_disk(tmp_path: Path) -> None:
    place = tmp_path / "folder"
    history = filled(History(detail=Detail(place)), range(10_000), [1.0] * 10_000)
    assert len(history.between(5, 8, ENOUGH).steps) == 4
    assert not place.exists()


def open_files(folder: Path) -> list[Path]:
    """Return this process's descriptors of files that are in a folder, or were."""
    found = Path("/proc/self/fd").iterdir()
    return [fd for fd in found if os.path.islink(fd) and str(folder) in os.readlink(fd)]


def test_the_file_has_no_name_and_goes_with_the_lines(tmp_path: Path) -> None:
    history = filled(History(detail=Detail(tmp_path)), range(50_000), [1.0] * 50_000)
    written()
    assert [path.name for path in tmp_path.iterdir()] == [".gitignore"]
    assert len(open_files(tmp_path)) == 1

    del history

    assert open_files(tmp_path) == []
