"""What a user of 0.1.0 could type is still there."""

import argparse
import inspect
import json
from pathlib import Path

import nbdist
from nbdist import cli
from nbdist.client.notebook import arguments
from nbdist.client.notebook.magics import NBDist

BEFORE = json.loads(Path(__file__).with_name("public_surface.json").read_text())
OF_OBJECTS = ("Session", "CellResult", "Layout")


def words_of(parser: argparse.ArgumentParser, command: str = "") -> set[str]:
    """Return each command, option and positional word of a parser, as `stop --all`."""
    words = set()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, sub in action.choices.items():
                at = f"{command} {name}".strip()
                words |= {at} | words_of(sub, at)
        elif action.option_strings:
            words |= {f"{command} {option}".strip() for option in action.option_strings}
        else:
            words.add(f"{command} <{action.dest}>".strip())
    return words


def attributes() -> set[str]:
    return {
        f"{name}.{member}"
        for name in OF_OBJECTS
        for member, _ in inspect.getmembers(getattr(nbdist, name))
        if not member.startswith("_")
    }


def parameters() -> set[str]:
    return {
        f"{name}({parameter})"
        for name in nbdist.__all__
        if inspect.isfunction(getattr(nbdist, name))
        for parameter in inspect.signature(getattr(nbdist, name)).parameters
    }


def surface() -> dict[str, set[str]]:
    return {
        "names": set(nbdist.__all__),
        "attributes": attributes(),
        "parameters": parameters(),
        "%dist": words_of(arguments.dist_parser()),
        "%%distributed": words_of(arguments.distributed_parser()),
        "nbdist": words_of(cli.build_parser()),
        "%config NBDist": set(NBDist.class_trait_names(config=True)),
    }


def test_all_that_a_user_could_type_is_still_there() -> None:
    now = surface()
    assert {kind: sorted(set(words) - now[kind]) for kind, words in BEFORE.items()} == {
        kind: [] for kind in BEFORE
    }
