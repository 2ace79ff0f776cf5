"""Run trials, in batches that can be stopped and gone on with: `python -m tests.random --help`.

A worker runs some trials, one after the other, each in a session of its own; what they came to is
appended to a file of JSON lines. This process starts workers, and ends one that hangs.
"""

import argparse
import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from tests.random import totals

ROOT = Path(__file__).resolve().parents[2]
LONGEST_S = 300.0  # of a trial, before its worker is taken to hang
BATCH = 20


def main() -> int:
    """Return the exit code: 1 where a trial has found something."""
    words = argparse.ArgumentParser(prog="python -m tests.random", description=__doc__)
    words.add_argument("--trials", type=int, default=500)
    words.add_argument("--seed", type=int, default=1, help="of the first trial; then one more each")
    words.add_argument("--resume", type=Path, default=Path(tempfile.gettempdir(), "trials.jsonl"))
    words.add_argument("--only", type=int, help="run the trial of this seed, and show its cells")
    words.add_argument("--totals", type=Path, help="write the table there")
    words.add_argument("--worker", type=int, nargs="+", help=argparse.SUPPRESS)
    given = words.parse_args()
    # A shell starts its background jobs with SIGINT ignored, and Python keeps it so.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if given.only is not None:
        return _show(given.only)
    if given.worker:
        _work(given.worker, given.resume)
        return 0
    seeds = range(given.seed, given.seed + given.trials)
    _run_all(seeds, given.resume)
    trials = [trial for trial in totals.read(given.resume) if trial["seed"] in seeds]
    table = totals.table(trials, totals.here())
    print(table)
    if given.totals is not None:
        given.totals.write_text(table)
    return int(any(trial["findings"] for trial in trials))


def _run_all(seeds: range, path: Path) -> None:
    """Run what is not in the file yet, a worker a batch."""
    while left := [seed for seed in seeds if seed not in {t["seed"] for t in totals.read(path)}]:
        batch = left[:BATCH]
        words = [sys.executable, "-m", "tests.random", "--resume", str(path)]
        worker = subprocess.Popen([*words, "--worker", *map(str, batch)], cwd=ROOT)
        said_at, size = time.monotonic(), -1
        while worker.poll() is None:
            time.sleep(0.5)
            now = path.stat().st_size if path.exists() else 0
            if now != size:
                said_at, size = time.monotonic(), now
            if time.monotonic() > said_at + LONGEST_S:
                worker.send_signal(signal.SIGUSR1)  # writes its stacks to stderr
                time.sleep(2)
                worker.kill()
        done = {trial["seed"] for trial in totals.read(path)}
        if worker.wait() != 0:
            stuck = next((seed for seed in batch if seed not in done), None)
            if stuck is not None:
                finding = {"kind": "a hang or a crash", "text": f"exit status {worker.returncode}"}
                _append(path, {"seed": stuck, "n": 0, "findings": [finding], "rows": []})


def _work(seeds: list[int], path: Path) -> None:
    from tests.random.run import run

    faulthandler.register(signal.SIGUSR1)
    with tempfile.TemporaryDirectory(prefix="nbdist-trials-") as folder:
        os.chdir(folder)
        runner = os.getppid()
        for seed in seeds:
            if os.getppid() != runner:
                return  # it was ended
            began = time.monotonic()
            try:
                driven, n = run(seed, Path(folder))
            except Exception:
                _print_logs(Path(folder))
                raise
            took = time.monotonic() - began
            found = ", ".join(finding.kind for finding in driven.findings)
            print(f"seed {seed}: n={n}, {len(driven.rows)} acts, {took:.1f} s  {found}", flush=True)
            findings = [asdict(finding) for finding in driven.findings]
            rows = [asdict(row) for row in driven.rows]
            trial = {"seed": seed, "n": n, "s": took, "findings": findings, "rows": rows}
            if findings:
                trial["story"] = driven.story
            _append(path, trial)


def _print_logs(folder: Path) -> None:
    """Print the ends of the newest session's logs, which go with the folder."""
    newest = max(folder.glob(".nbdist/logs/*"), key=os.path.getmtime, default=folder)
    for log in sorted(newest.glob("*")):
        if log.is_file():
            print(f"--- {log.name}", log.read_text(errors="replace")[-3000:], sep="\n", flush=True)


def _append(path: Path, trial: dict[str, object]) -> None:
    # In one write: several runners may share the file, each with seeds of its own.
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(file, (json.dumps(trial) + "\n").encode())
    os.close(file)


def _show(seed: int) -> int:
    from tests.random.run import run

    faulthandler.register(signal.SIGUSR1)
    with tempfile.TemporaryDirectory(prefix="nbdist-trials-") as folder:
        os.chdir(folder)
        driven, n = run(seed, Path(folder))
    print(f"seed {seed}, n={n}", *driven.story, sep="\n")
    return int(bool(driven.findings))


if __name__ == "__main__":
    sys.exit(main())
