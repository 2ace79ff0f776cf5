"""Files that break, go or stall while they are read: read again, named, or left out."""

import logging
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nbdist.engine.data.make import loader
from nbdist.shared.errors import DataError
from tests.group import s3_server

ROWS, GROUP = 16, 8  # of a file, of a row group


def write(path: Path, first: int, kind: Any = None) -> None:
    numbers = pa.array(range(first, first + ROWS), kind or pa.int64())
    pq.write_table(pa.table({"n": numbers}), path, row_group_size=GROUP)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four files of two row groups: samples 0 ... 63 as they are numbered."""
    for nth in range(4):
        write(tmp_path / f"{nth}.parquet", nth * ROWS)
    return tmp_path


def break_second_group(path: Path) -> bytes:
    """Write noise over the pages of a file's second row group; return what was there."""
    whole = path.read_bytes()
    column = pq.read_metadata(path).row_group(1).column(0)
    start = min(filter(None, (column.dictionary_page_offset, column.data_page_offset)))
    path.write_bytes(whole[:start] + b"\xff" * 40 + whole[start + 40 :])
    return whole


def numbers(batches: Any) -> list[int]:
    return [n for batch in batches for n in batch["n"].tolist()]


def test_a_broken_row_group_is_named_and_the_loop_goes_on_once_it_is_whole(folder: Path) -> None:
    whole = break_second_group(folder / "2.parquet")
    loop = iter(loader(folder, global_batch=8, shuffle=False, interleave=1))
    seen = [n for _ in range(5) for n in next(loop)["n"].tolist()]
    with pytest.raises(DataError, match=r"2\.parquet, row group 1 of .* could not be read"):
        next(loop)
    (folder / "2.parquet").write_bytes(whole)
    assert seen + numbers(loop) == list(range(64))


def test_a_broken_file_may_be_written_again_in_other_pieces(tmp_path: Path) -> None:
    def again(compression: str) -> None:
        table = pa.table({"n": pa.array([n // 3 for n in range(64)], pa.int64())})
        file = tmp_path / "0.parquet"
        pq.write_table(table, file, row_group_size=32, compression=compression)

    again("none")
    break_second_group(tmp_path / "0.parquet")
    loop = iter(loader(tmp_path, global_batch=32, shuffle=False, interleave=1))
    seen = next(loop)["n"].tolist()
    with pytest.raises(DataError, match=r"0\.parquet, row group 1 of .* could not be read"):
        next(loop)
    again("zstd")
    assert seen + numbers(loop) == [n // 3 for n in range(64)]


def test_a_file_that_vanished_is_named_and_not_waited_for(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train = loader(folder, global_batch=8, shuffle=False, interleave=1)
    (folder / "3.parquet").unlink()
    with pytest.raises(DataError, match=r"3\.parquet, row group 0 of .* is not there"):
        numbers(train)
    assert "again" not in caplog.text


def test_a_schema_that_changes_between_files_names_both(folder: Path) -> None:
    write(folder / "1.parquet", 0, pa.float64())
    with pytest.raises(DataError) as caught:
        loader(folder, global_batch=8)
    assert "int64 in 0.parquet, double in 1.parquet" in caught.value.what


def test_skipped_groups_are_named_and_what_is_left_comes_once(folder: Path) -> None:
    break_second_group(folder / "1.parquet")
    train = loader(folder, global_batch=16, seed=1, interleave=4, on_bad="skip")
    lost = set(range(24, 32))
    assert sorted(numbers(train)) == sorted(set(range(64)) - lost)
    assert {one.sample for one in train.skipped} == lost
    assert all("1.parquet, row group 1" in one.why for one in train.skipped)


def is_reading() -> bool:
    """Return whether a thread reads a group."""
    for frame in sys._current_frames().values():
        if "_read" in {
            found.name
            for found in traceback.StackSummary.extract(
                traceback.walk_stack(frame), lookup_lines=False
            )
        }:
            return True
    return False


class Proxy:
    """Stands before a server; requests for data that come while `stalls` is not 0 hang."""

    def __init__(self, port: int) -> None:
        self.stalls = 0
        self._to = port
        self._held: list[socket.socket] = []
        self._stalled: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for one in [self._listener, *self._held]:
            one.close()

    def let_go(self) -> None:
        """Break what hangs, and let all that comes pass: what reads must end before Python does."""
        self.stalls = 0
        for one in self._stalled:
            one.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + 30
        while is_reading() and time.monotonic() < deadline:
            time.sleep(0.02)

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self._listener.accept()
            except OSError:
                return
            there = socket.create_connection(("127.0.0.1", self._to))
            self._held += [here, there]
            for ends in ((here, there), (there, here)):
                threading.Thread(target=self._pump, args=ends, daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                if self.stalls and data.startswith(b"GET") and b".parquet" in data:
                    self.stalls -= 1
                    self._stalled.append(source)
                    return  # both ends stay open, and nothing comes
                target.sendall(data)
        except OSError:
            return


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[Proxy]:
    with (
        s3_server.serve(tmp_path / "s3") as server,
        closing(Proxy(server.port)) as between,
    ):
        for nth in range(4):
            write(server.folder / "bucket" / f"{nth}.parquet", nth * ROWS)
        yield between
        between.let_go()


def test_a_store_that_stalls_is_asked_again_and_one_that_never_answers_is_an_error(
    proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "nbdist.data")
    options = s3_server.options(proxy.port)
    train = loader("s3://bucket", global_batch=8, shuffle=False, storage_options=options, timeout=1)
    proxy.stalls = 1
    assert sorted(numbers(train)) == list(range(64))
    assert "gave nothing for 1 s; it is read again (1 of 3)" in caplog.text
    loop, proxy.stalls = iter(train), 1000
    with pytest.raises(DataError, match=r"nothing came for 1 s, 4 times"):
        next(loop)
    proxy.stalls = 0
    assert sorted(numbers(loop)) == list(range(64))
