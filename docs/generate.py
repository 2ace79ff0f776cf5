"""Fill in what the pages take from the code, while MkDocs builds them.

A page asks by a comment on a line of its own:

    <!-- magics -->                 the `--help` text of `%dist`, its commands and `%%distributed`
    <!-- options -->                what `nbdist.start` takes, with its defaults
    <!-- defaults -->               the traits of `c.NBDist`, with their defaults
    <!-- rules -->                  the rules on silent mistakes: what each says, and its example
    <!-- api: NAME members... -->   the docstring of `nbdist.NAME`, by mkdocstrings
    <!-- file: PATH -->             a file of the repository, its headings one level deeper
    <!-- needs: WORDS -->           nothing: why a test leaves the next block of code out

Nothing heavy is imported: neither torch nor IPython needs to be installed. By itself, `python
docs/generate.py` prints the magics' help.
"""

import argparse
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import nbdist  # noqa: E402
from nbdist.client.metrics.checks.page import section  # noqa: E402
from nbdist.client.metrics.checks.rules import all_rules  # noqa: E402
from nbdist.client.notebook import arguments  # noqa: E402
from nbdist.client.notebook.start_options import all_options  # noqa: E402
from nbdist.shared.options import Option  # noqa: E402

WIDTH = 92  # characters of a help text's line

_ASKED = re.compile(r"^<!-- (?P<what>\w+)(?:: (?P<words>.+?))? -->$", re.MULTILINE)
_RETURNED = {"Session", "Layout", "CellResult"}  # users get these, and never call the class
_seen: set[str] = set()  # names of the Python API that a page has shown


def on_pre_build(**_: Any) -> None:
    """Forget the names of the build before; called by MkDocs."""
    _seen.clear()


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return a page with its comments replaced; called by MkDocs."""
    return _ASKED.sub(lambda asked: _fill(asked["what"], (asked["words"] or "").split()), markdown)


def on_env(env: Any, **_: Any) -> Any:
    """Fail when a public name is on no page; called by MkDocs once all pages are read."""
    missing = sorted(set(nbdist._PLACES) - _seen)
    if missing:
        raise ValueError(f"No page shows {', '.join(missing)}: see docs/reference/api.md.")
    return env


def _fill(what: str, words: list[str]) -> str:
    match what:
        case "magics":
            return "\n\n".join(magics())
        case "defaults":
            return options("c.NBDist.", (one for one in all_options().values() if one.trait))
        case "options":
            return options("", all_options().values())
        case "rules":
            return "\n\n".join(map(section, all_rules()))
        case "api":
            return _api(*words)
        case "needs":
            return ""
        case "file":
            return re.sub(r"^#", "##", (ROOT / words[0]).read_text(), flags=re.MULTILINE)
        case _:
            raise ValueError(f"docs/generate.py cannot fill in {what!r}.")


def magics() -> Iterator[str]:
    """Yield a section for each magic: its name and its help."""
    dist = arguments.dist_parser()
    commands = next(a for a in dist._actions if isinstance(a, argparse._SubParsersAction))
    for parser in (dist, *commands.choices.values(), arguments.distributed_parser()):
        yield _section(parser)


def _section(parser: argparse.ArgumentParser) -> str:
    parser.formatter_class = lambda prog: argparse.HelpFormatter(prog, width=WIDTH)
    anchor = parser.prog.replace("%", "").replace(" ", "-")
    return f"## `{parser.prog}` {{ #{anchor} }}\n\n```text\n{parser.format_help().rstrip()}\n```"


def options(prefix: str, shown: Iterable[Option]) -> str:
    """Return a table of options of a start."""
    rows = [f"| `{prefix}{one.name}` | `{one.default!r}` | {one.text} |" for one in shown]
    return "\n".join(["| option | default | what it is |", "| --- | --- | --- |", *rows])


def _api(name: str, *members: str) -> str:
    _seen.add(name)
    shown = f"[{', '.join(members)}]" if members else "false"
    return (
        f"::: {nbdist._PLACES[name]}.{name}\n"
        f"    options:\n"
        f"      heading: nbdist.{name}\n"
        f"      toc_label: {name}\n"
        f"      members: {shown}\n"
        f"      inherited_members: {str(bool(members)).lower()}\n"
        f"      merge_init_into_class: {str(name not in _RETURNED).lower()}\n"
    )


if __name__ == "__main__":
    print("\n\n".join(magics()))
