"""Run commands that may hang: each has its time, and what fails shows what it printed."""

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from typing import IO


class CommandFailed(AssertionError):
    """A command that had to succeed did not; its text is the command's own output."""


def call(
    command: Sequence[str],
    *,
    timeout_s: float = 60,
    stdin: str = "",
    env: Mapping[str, str] | None = None,
    check: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, and return its output.

    Raises:
        CommandFailed: it failed and `check` is true, or it took longer than `timeout_s`. Then it
            is killed with its process group.
    """
    # Files, not pipes: a grandchild that keeps a pipe open would keep us waiting for its end.
    with tempfile.TemporaryFile("w+") as typed, _text_file() as output, _text_file() as errors:
        typed.write(stdin)
        typed.seek(0)
        process = subprocess.Popen(
            command, stdin=typed, stdout=output, stderr=errors, env=env, start_new_session=True
        )
        late = False
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            end(process)
        done = subprocess.CompletedProcess(
            list(command), process.returncode, _text(output), _text(errors)
        )
    if late or (check and done.returncode != 0):
        how = f"did not end in {timeout_s} s" if late else f"exited with {done.returncode}"
        raise CommandFailed(f"{' '.join(command)}\n{how}\n{done.stdout}\n{done.stderr}")
    return done


def end(process: "subprocess.Popen[str] | subprocess.Popen[bytes]") -> None:
    """Kill a process that was started as a session of its own, with its group, and reap it."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


def close_pipes(process: "subprocess.Popen[str]") -> None:
    """Close the pipes to a process that has ended, whatever was still to be written."""
    for pipe in (process.stdin, process.stdout, process.stderr):
        with contextlib.suppress(BrokenPipeError):
            if pipe is not None:
                pipe.close()


def _text_file() -> IO[str]:
    return tempfile.TemporaryFile("w+", errors="replace")


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()
