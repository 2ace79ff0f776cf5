"""Bytes that ranks put on the wire: counted by the kernel, in a network of their own."""

import subprocess
import sys
from pathlib import Path

import pytest

from nbdist.client.insight.traffic import sent_bytes
from tests.group.wire_bytes import CASES

ROOT = Path(__file__).resolve().parents[2]


def _measured(n: int, kind: str) -> tuple[float, int]:
    """Return what the loopback of a network namespace carried for one call, and the tap's bytes.

    The first is the mean of the ranks.
    """
    command = [
        *("unshare", "--net", "--map-root-user", "--user", sys.executable),
        *("-m", "tests.group.wire_bytes", str(n), kind),
    ]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    wire, counted = ran.stdout.split()[-2:]
    return float(wire), int(counted)


def _why_not() -> str:
    """Return why this machine gives us no network namespace, "" where it does."""
    try:
        command = ["unshare", "--net", "--map-root-user", "--user", "ip", "link", "set", "lo", "up"]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except OSError as error:
        return str(error)
    return "" if ran.returncode == 0 else ran.stderr.strip() or f"exit status {ran.returncode}"


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("n", [2, 3])
def test_bytes_of_a_collective_are_those_on_the_wire(n: int, kind: str) -> None:
    why_not = _why_not()
    if why_not:
        pytest.skip(f"NOT CHECKED: no network namespace here: {why_not}")
    wire, counted = _measured(n, kind)
    assert counted > 5_000_000
    senders = 1 / n if kind == "send" else 1  # one rank of them all sends
    assert wire == pytest.approx(sent_bytes(kind, counted, n, "gloo") * senders, rel=0.01)
