"""The limit of open files that ranks inherit."""

import resource
import subprocess
import sys

from nbdist.client.cluster.open_files import ENOUGH, chosen_limit

LIMITED = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
from nbdist.client.cluster.open_files import allow_open_files
from nbdist.shared.errors import StartError
try:
    allow_open_files()
    print(resource.getrlimit(resource.RLIMIT_NOFILE))
except StartError as error:
    print(error)
"""


def said_with(soft: int, hard: int) -> str:
    code = LIMITED.format(soft=soft, hard=hard)
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


FULL = """
import os, resource
from nbdist.client.cluster.open_files import FEWEST_FREE, require_files_to_start
from nbdist.shared.errors import StartError
resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))
held = [os.open(os.devnull, os.O_RDONLY) for _ in range(300 - len(os.listdir("/dev/fd")) - 9)]
try:
    require_files_to_start()
except StartError as error:
    print(error)
for descriptor in held[:FEWEST_FREE]:
    os.close(descriptor)
before = os.listdir("/dev/fd")
require_files_to_start()
assert os.listdir("/dev/fd") == before
"""


def test_a_start_without_files_left_is_refused_before_it_opens_any() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", FULL], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.stderr == ""
    what, why, do = ran.stdout.splitlines()
    assert what == "The notebook's kernel can open only 10 more files, and a start needs 48."
    assert "too many open files: it may have 300 (ulimit -n)" in why
    assert "close what the notebook has opened, or restart the kernel" in do
    assert "ulimit -n 4096" in do


def test_a_limit_is_raised_as_far_as_it_may_and_never_lowered() -> None:
    infinite = resource.RLIM_INFINITY
    assert chosen_limit(256, infinite) == ENOUGH
    assert chosen_limit(256, 1024) == 1024
    assert chosen_limit(100_000, 100_000) == 100_000
    assert chosen_limit(infinite, infinite) == infinite
    assert said_with(80, 1000).strip() == "(1000, 1000)"


def test_too_few_files_are_one_error_that_names_the_limit_and_what_to_do() -> None:
    assert said_with(80, 80) == (
        "A process may have only 80 files open here, and a rank needs 256.\n"
        "Why: the limit is 80 (ulimit -n), and may be raised to 80 at most (ulimit -Hn).\n"
        "Do:  ulimit -n 4096 in the shell that starts Jupyter, or ask who set the limit.\n"
    )
