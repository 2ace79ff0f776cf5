"""Seeing a process end that is not one's child, with real processes."""

import os
import subprocess
import sys
import threading
from pathlib import Path

from nbdist.shared.processes import lifeline


def sleeper() -> "subprocess.Popen[bytes]":
    return subprocess.Popen(["sleep", "60"])


def test_the_end_of_a_process_is_seen_at_once() -> None:
    process = sleeper()
    seen = threading.Event()
    lifeline.watch(process.pid, seen.set)
    assert lifeline.is_alive(process.pid)
    assert not seen.is_set()
    process.kill()
    process.wait()
    assert seen.wait(30)
    assert not lifeline.is_alive(process.pid)


def test_a_process_that_has_ended_already_is_seen_too() -> None:
    process = sleeper()
    process.kill()
    process.wait()
    seen = threading.Event()
    lifeline.watch(process.pid, seen.set)
    assert seen.wait(30)


def test_this_process_is_alive() -> None:
    assert lifeline.is_alive(os.getpid())


def test_a_command_under_the_lifeline_ends_with_the_process_it_hangs_on() -> None:
    kernel = sleeper()
    command = [
        sys.executable,
        "-m",
        "nbdist.shared.processes.lifeline",
        str(kernel.pid),
        "sleep",
        "60",
    ]
    guarded = subprocess.Popen(command, cwd=Path(__file__).parents[3])
    try:
        kernel.kill()
        kernel.wait()
        assert guarded.wait(30) != 0
    finally:
        guarded.kill()
        guarded.wait()
