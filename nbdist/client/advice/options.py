"""The options of advice that the notebook and the terminal share."""

from argparse import ArgumentParser, Namespace
from typing import Any

PASSING = (
    "Estimating layouts: some seconds each, about a minute in all; large models take longer ..."
)


def add_options(parser: ArgumentParser) -> None:
    """Add the options that the notebook and the terminal share."""
    parser.add_argument(
        "--on", metavar="MACHINE", help='such as "8 h100 nvlink4, 2 hosts ib400", in quotes'
    )
    parser.add_argument(
        "--global-batch", type=int, metavar="N", help="samples in a step over all ranks"
    )
    parser.add_argument(
        "--samples", type=int, default=0, metavar="N", help="of the whole run, for its cost"
    )
    parser.add_argument("--prices", metavar="FILE", help="a price table in TOML: docs/advice.md")


def options_of(asked: Namespace) -> dict[str, Any]:
    """Return the arguments of `nbdist.advise` that these options are."""
    return {
        "global_batch": asked.global_batch,
        "samples": asked.samples,
        "prices": asked.prices,
    }
