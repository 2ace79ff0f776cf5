"""One trial in a session of its own, from its seed."""

import os
from pathlib import Path

import torch

import nbdist
from tests.random.calls import Driven
from tests.random.drive import drive
from tests.random.trial import draw

ROOT = Path(__file__).resolve().parents[2]


def run(seed: int, folder: Path) -> tuple[Driven, int]:
    """Run the trial of a seed; returns what it came to, and with how many ranks it began.

    Args:
        seed: Of the trial.
        folder: Where files that remember faults lie; the working directory's `.nbdist` has the
            session's own.
    """
    torch.set_num_threads(1)
    # Ranks import the data and the faults.
    os.environ["PYTHONPATH"] = str(ROOT)
    trial = draw(seed)
    os.environ["NBDIST_STATIC"] = "1" if trial.static else "0"
    flags = folder / f"trial{seed}"
    flags.mkdir()
    with nbdist.start(n=trial.n, device="cpu", threads=1) as session:
        return drive(trial, session, flags), trial.n
