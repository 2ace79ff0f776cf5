"""Ask this user's clusters on other hosts: `nbdist status --on HOST,HOST`, over ssh."""

import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from nbdist.shared.errors import ClusterError, UsageError

_ANSWER_S = 90.0  # a login, and the longest that `nbdist stop` waits


def ask(hosts: str, words: Sequence[str]) -> str:
    """Return what `nbdist WORDS` says on each host, all asked at once.

    Args:
        hosts: Names that ssh knows, with commas between them.
        words: Of the command, without `--on`.

    Raises:
        ClusterError: No host answered; it says why, for each.
        UsageError: `hosts` has an empty name, or one that ssh would take for an option.
    """
    names = [name.strip() for name in hosts.split(",")]
    if any(not name or name.startswith("-") for name in names):
        raise UsageError(f"--on takes names of hosts, such as a,b, not {hosts!r}.")
    with ThreadPoolExecutor(len(names)) as threads:
        answers = dict(zip(names, threads.map(lambda name: _ask(name, words), names), strict=True))
    if not any(is_answer for is_answer, _ in answers.values()):
        why = "; ".join(f"{name}: {said}" for name, (_, said) in answers.items())
        raise ClusterError("No host has answered.", why=why)
    return "\n\n".join(f"{name}:\n{said}" for name, (_, said) in answers.items())


def _ask(host: str, words: Sequence[str]) -> tuple[bool, str]:
    """Return whether `nbdist` ran on a host, and what it said or why it did not run."""
    from nbdist.client.cluster.launchers.ssh import command_on, explain

    command = command_on(host, ["-m", "nbdist.cli", *words])
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_ANSWER_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False, f"no answer within {_ANSWER_S:.0f} s"
    except OSError as error:
        return False, f"ssh: {error.strerror}"
    if done.stdout.strip() or done.returncode in (0, 1):  # 1: an error of nbdist's, in words
        return True, (done.stdout + done.stderr).strip()
    return False, explain(host, done.returncode, done.stderr)[0]
