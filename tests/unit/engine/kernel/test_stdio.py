"""What a rank prints, from its streams to the messages that leave it."""

import errno
import logging
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nbdist.engine.kernel.output.stdio import HEAD_BYTES, Output
from nbdist.engine.kernel.output.stdio_files import LogStream
from nbdist.engine.kernel.output.text_window import WINDOW_BYTES


class Notebook:
    """Receives messages; `heard` is what a client would put together of them."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.arrived = threading.Event()

    def __call__(self, message: dict[str, Any]) -> None:
        self.messages.append(message)
        self.arrived.set()

    @property
    def parts(self) -> list[list[str]]:
        return [part for message in self.messages for part in message["parts"]]

    @property
    def text(self) -> str:
        return "".join(text for _, text in self.parts)


@pytest.fixture
def notebook() -> Notebook:
    return Notebook()


@pytest.fixture
def output(tmp_path: Path, notebook: Notebook) -> Iterator[Output]:
    made = Output(2, tmp_path, notebook)
    yield made
    made.close()


def test_prints_and_errors_keep_their_order_across_streams(
    output: Output, notebook: Notebook
) -> None:
    output.begin_cell(1)
    print("a", file=output.stdout)
    print("b", file=output.stderr)
    print("c", file=output.stdout)
    output.end_cell()
    assert notebook.text == "a\nb\nc\n"
    assert [name for name, _ in notebook.parts] == ["stdout", "stderr", "stdout"]


def test_the_first_text_of_a_cell_leaves_while_the_cell_still_runs(
    output: Output, notebook: Notebook
) -> None:
    output.begin_cell(1)
    print("hello", file=output.stdout)
    assert notebook.arrived.wait(30)
    assert notebook.text == "hello\n"


def test_flush_hands_over_everything_before_it_returns(output: Output, notebook: Notebook) -> None:
    output.begin_cell(1)
    for i in range(100):
        output.stdout.write(f"{i} ")
        output.flush()
        assert notebook.text.endswith(f"{i} ")


def test_a_small_cell_leaves_no_file(output: Output, tmp_path: Path) -> None:
    output.begin_cell(1)
    print("small", file=output.stdout)
    assert output.end_cell() == (0, None)
    assert list(tmp_path.iterdir()) == []


def test_a_flood_is_kept_whole_in_a_file_and_reaches_the_notebook_as_head_and_tail(
    output: Output, notebook: Notebook
) -> None:
    output.begin_cell(7)
    said = [f"line {i}\n" for i in range(200_000)]
    for line in said:
        output.stdout.write(line)
    cut, file = output.end_cell()
    whole = "".join(said)
    assert file is not None
    assert file.name == "cell-7-rank-2.txt"
    assert file.read_text() == whole
    assert file.stat().st_mode & 0o777 == 0o600
    heads = [m for m in notebook.messages if "window" not in m]
    head = "".join(text for m in heads for _, text in m["parts"])
    assert head == whole[:HEAD_BYTES]
    last = notebook.messages[-1]
    tail = "".join(text for _, text in last["parts"])
    assert whole.endswith(tail)
    assert WINDOW_BYTES <= len(tail) < 2 * WINDOW_BYTES
    assert cut == last["cut_bytes"] == len(whole) - len(head) - len(tail)


def test_one_huge_print_is_cut_as_many_small_ones_are(output: Output, notebook: Notebook) -> None:
    output.begin_cell(1)
    output.stdout.write("é" * 3_000_000)
    cut, file = output.end_cell()
    assert cut > 5_000_000
    assert file is not None
    assert file.read_text() == "é" * 3_000_000
    assert len(notebook.text) < 2 * HEAD_BYTES


def test_a_progress_bar_stays_alive_long_after_the_head_is_full(
    output: Output, notebook: Notebook
) -> None:
    output.begin_cell(1)
    output.stdout.write("x" * (HEAD_BYTES + 10))
    output.flush()
    notebook.arrived.clear()
    output.stderr.write("\r 50%|#####     |")
    assert notebook.arrived.wait(30)
    assert notebook.messages[-1]["parts"] == [["stderr", "\r 50%|#####     |"]]


def test_a_full_disk_is_said_once_and_the_cell_goes_on(
    output: Output, notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, data: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    output.begin_cell(1)
    monkeypatch.setattr(os, "write", full)
    for i in range(60_000):
        output.stdout.write(f"line {i} of many\n")
    output.stdout.write("the end\n")
    cut, file = output.end_cell()
    monkeypatch.undo()
    assert cut > 0
    assert file is None
    assert notebook.text.endswith("the end\n")
    assert notebook.text.startswith("line 0 of many\n")


def test_text_between_cells_comes_first_in_the_next_and_is_bounded(
    output: Output, notebook: Notebook
) -> None:
    for i in range(10_000):
        output.stdout.write(f"late {i}\n")
    output.begin_cell(2)
    output.stdout.write("now\n")
    output.end_cell()
    assert notebook.text.endswith("late 9999\nnow\n")
    assert len(notebook.text) < 2 * WINDOW_BYTES


def test_a_notebook_that_cannot_be_reached_does_not_fail_a_print(tmp_path: Path) -> None:
    def broken(message: dict[str, Any]) -> None:
        raise ConnectionError("gone")

    made = Output(0, tmp_path, broken)
    try:
        made.begin_cell(1)
        print("hello", file=made.stdout)
        made.flush()
        assert made.end_cell() == (0, None)
    finally:
        made.close()


def test_many_threads_lose_nothing(output: Output, notebook: Notebook) -> None:
    def speak(name: int) -> None:
        for i in range(200):
            output.stdout.write(f"{name}-{i}\n")

    output.begin_cell(1)
    threads = [threading.Thread(target=speak, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    output.end_cell()
    said = notebook.text.split()
    assert len(said) == 1600
    for name in range(8):
        assert [s for s in said if s.startswith(f"{name}-")] == [f"{name}-{i}" for i in range(200)]


def in_a_process(body: str, folder: Path) -> tuple[str, str]:
    """Run `body` in a process whose streams are an installed Output; return (heard, log)."""
    program = f"""
import os, sys, json, subprocess, time
from pathlib import Path
from nbdist.engine.kernel.output.stdio import Output
messages = []
output = Output(0, Path({str(folder)!r}), messages.append)
output.install()
output.begin_cell(1)
{textwrap.dedent(body)}
output.end_cell()
output.close()
print(json.dumps("".join(t for m in messages for _, t in m["parts"])))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    import json

    return json.loads(done.stdout), done.stderr


def test_a_subprocess_and_c_code_are_seen_in_order_with_prints(tmp_path: Path) -> None:
    heard, _ = in_a_process(
        """
        print("one")
        os.system("echo two")
        print("three")
        subprocess.run(["echo", "four"], stdout=sys.stdout)
        print("five")
        os.write(2, b"six\\n")
        """,
        tmp_path,
    )
    assert heard == "one\ntwo\nthree\nfour\nfive\nsix\n"


def test_forked_children_that_print_are_heard_and_never_hang(tmp_path: Path) -> None:
    heard, _ = in_a_process(
        """
        import threading
        def noise():
            for i in range(3000):
                sys.stdout.write(f"n {i}\\n")
        noisy = threading.Thread(target=noise)
        noisy.start()
        children = []
        for k in range(10):
            pid = os.fork()
            if pid == 0:
                print("child", k)
                print("to stderr", k, file=sys.stderr)
                sys.stdout.flush()
                os._exit(0)
            children.append(pid)
        for pid in children:
            assert os.waitpid(pid, 0)[1] == 0
        noisy.join()
        """,
        tmp_path,
    )
    for k in range(10):
        assert f"child {k}\n" in heard
        assert f"to stderr {k}\n" in heard
    assert [line for line in heard.split("\n") if line.startswith("n ")] == [
        f"n {i}" for i in range(3000)
    ]


def test_what_a_dying_process_said_last_is_on_the_disk(tmp_path: Path) -> None:
    program = f"""
import os
from pathlib import Path
from nbdist.engine.kernel.output.stdio import Output
output = Output(3, Path({str(tmp_path)!r}), lambda message: None)
output.install()
output.begin_cell(1)
os.write(2, b"terminate called\\n")
os.abort()
"""
    subprocess.run([sys.executable, "-c", program], timeout=60, check=False)
    assert (tmp_path / "rank-3.stderr").read_text() == "terminate called\n"


def test_a_log_whose_disk_is_full_loses_lines_and_prints_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("/dev/full is Linux's")
    descriptor = os.open("/dev/full", os.O_WRONLY)
    logger = logging.Logger("ours")
    logger.addHandler(logging.StreamHandler(LogStream(descriptor)))
    logger.error("lost")
    os.close(descriptor)
    assert capsys.readouterr() == ("", "")
