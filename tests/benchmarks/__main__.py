"""`make bench`: every figure of the product, as a table of ratios, and what falls short.

Each figure is taken beside a reference on the same machine, in turns; medians. Words choose groups:
`python -m tests.benchmarks cells start`. With `--save` they go into the machine's file in
docs/figures/, and the table in docs/benchmarks.md is written anew.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence

from nbdist.host.warm import find_gpus
from tests.benchmarks import (
    bench_64_ranks,
    bench_board,
    bench_cells,
    bench_checkpoints,
    bench_checks,
    bench_data,
    bench_evidence,
    bench_faults,
    bench_hosts,
    bench_layout,
    bench_libraries,
    bench_peers,
    bench_start,
    bench_step,
    bench_tap,
    figures,
)
from tests.benchmarks.neighbours import named_busy, neighbours
from tests.benchmarks.table import Row, render


def _busy_rows() -> list[Row]:
    """Return the figures of a person at the notebook, on cores that others keep busy."""
    with neighbours():
        return named_busy(
            [
                *bench_cells.rows((4,), rounds=10),
                *bench_step.rows(rounds=2, shorter=4),
                *bench_start.rows(rounds=1, sizes=(4,)),
            ]
        )


GROUPS: dict[str, Callable[[], list[Row]]] = {
    "cells": bench_cells.rows,
    "libraries": bench_libraries.rows,
    "start": bench_start.rows,
    "step": bench_step.rows,
    "step-cuda": bench_step.gpu_rows,
    "tap": bench_tap.rows,
    "checks": lambda: [*bench_checks.rows(), *bench_evidence.rows()],
    "frame": bench_board.rows,
    "faults": bench_faults.rows,
    "peers": bench_peers.rows,
    "hosts": bench_hosts.rows,
    "layouts": bench_layout.rows,
    "checkpoints": bench_checkpoints.rows,
    "data": bench_data.rows,
    "busy": _busy_rows,
    "ranks64": bench_64_ranks.rows,
}
ON_REQUEST = ("ranks64", "step-cuda")  # wants several GB of memory; a GPU
ON_GPU = {"step": "step-cuda"}


def write_page() -> None:
    """Write the table of docs/benchmarks.md from what is stored."""
    text = figures.table(figures.load(), list(GROUPS))
    figures.PAGE.write_text(figures.filled(figures.PAGE.read_text(), text))


def measure(name: str, note: str) -> figures.Group:
    """Return the rows of a group."""
    print(f"measuring: {name}", file=sys.stderr, flush=True)
    began = time.monotonic()
    rows = tuple(GROUPS[name]())
    print(f"  {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return figures.Group(time.strftime("%Y-%m-%d"), note, rows)


def choose(words: Sequence[str], device: str, count: Callable[[], int]) -> list[str]:
    """Return the groups to measure.

    Args:
        words: Names of groups; none for all that this device has but those on request.
        device: "cpu" or "cuda".
        count: Counts the GPUs of this machine.

    Raises:
        ValueError: There is no such group, or it cannot be measured here.
    """
    if unknown := sorted(set(words) - set(GROUPS)):
        raise ValueError(f"there is no group {unknown[0]!r}; they are {', '.join(GROUPS)}")
    if device == "cuda":
        words = [ON_GPU.get(name, name) for name in words or ON_GPU]
        if others := [name for name in words if name not in ON_GPU.values()]:
            raise ValueError(f"--device cuda is for {', '.join(ON_GPU)}, not for {others[0]}")
    if set(words) & set(ON_GPU.values()) and not count():
        raise ValueError(
            "--device cuda needs an NVIDIA GPU, and torch finds none on this machine: leave it "
            "out to measure on the CPU"
        )
    return list(words) or [name for name in GROUPS if name not in ON_REQUEST]


def main(words: Sequence[str]) -> int:
    """Measure the chosen groups, print one table, and store it where asked to."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks")
    parser.add_argument(
        "group", nargs="*", help=f"{', '.join(GROUPS)}; without: all but {', '.join(ON_REQUEST)}"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="for step")
    parser.add_argument("--save", action="store_true", help="store figures, and write the page")
    parser.add_argument("--note", default="", help='for the page, such as "others at work"')
    asked = parser.parse_args(words)
    try:
        groups = choose(asked.group, asked.device, lambda: find_gpus(fork=False)[0])
    except ValueError as error:
        parser.error(str(error))
    # pip compiles what it installs. A checkout that is never compiled adds 0.5 s to each start.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    machine = figures.this_machine()
    rows: list[Row] = []
    for name in groups:
        group = measure(name, asked.note)
        rows += group.rows
        if asked.save and group.rows:  # at once: a run that is stopped keeps what it has measured
            figures.save(machine, {name: group})
            write_page()
    print(f"{machine}, {time.strftime('%Y-%m-%d')}")
    print(render([[row] for row in rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
