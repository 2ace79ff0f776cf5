"""Read the words after `%dist` and `%%distributed`: pure."""

import argparse
import contextlib
import functools
import re
import shlex
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn, get_args, get_origin

from nbdist.client.advice.options import add_options
from nbdist.client.board.views import VIEWS, require_view
from nbdist.client.cells.params import drop_comment, read_param, split_line
from nbdist.client.cluster.launchers.base import LOCAL, OWN, NoOptions, find_options
from nbdist.client.expect.assertion import FORMS, OVER_STEPS
from nbdist.client.export.export import TORCHRUN
from nbdist.client.export.jobs import FORMATS
from nbdist.client.metrics.checks.settings import require_rules
from nbdist.client.notebook.start_options import all_options
from nbdist.shared.errors import UsageError
from nbdist.shared.options import (
    ANIMATIONS,
    Option,
    Parser,
    flag_of,
    read_seconds,
    read_word,
)
from nbdist.study.accelerators import ACCELERATORS
from nbdist.study.links import BETWEEN_HOSTS, INSIDE_HOSTS
from nbdist.study.machine import EXAMPLE

COMMANDS = {
    "start": "start the ranks and create their process group",
    "attach": "continue with a detached cluster: what ranks hold, and the cell that they run; NAME "
    "is by default the only one that no kernel has",
    "status": "show each rank: host, device, pid, state, step, memory, last collective",
    "stop": "end all ranks; what they hold is lost",
    "restart": "start new processes: with -r for these ranks, which get what a living rank holds, "
    "except shards; without -r for all, and variables are lost",
    "scale": "add or remove ranks; variables are kept, but sharded models, groups and meshes must "
    "be re-created",
    "retry": "recover the ranks, and run the last failed cell again",
    "push": "copy variables from the notebook to the ranks",
    "pull": "copy a variable from the ranks: NAME becomes a list with one entry per rank",
    "verify": "compare a layout with one process on the same split; changes nothing",
    "expect": "check what is said of the newest training, for notebooks that are tests",
    "probe": "measure latency and bandwidth between the ranks, and how fast they compute",
    "advise": "say which layout trains a model best on a machine, and why, before it is paid for",
    "scaling": "run a cell's steps on 1, 2, 4 and more ranks, in processes of their own: speed-up, "
    "what it is lost to, and a forecast; or what would change the newest training's step",
    "stacks": "show where each rank is: cell line, collective, ranks that it waits for",
    "pause": "let the training stand still, all ranks after the same step",
    "continue": "let a training go on that is paused",
    "change": "set lr, or a -p parameter, on all ranks after the same step: change lr=0.01",
    "peek": "evaluate an expression on all ranks after the same step: peek model.weight.norm()",
    "checks": "list the rules that watch for silent mistakes, their state, and what they cost; "
    "with a name: what that rule says, an example, and the remedy",
    "replay": "run a step again that was left out as not finite, or STEP of a cell with --keep: "
    "which rank, module and sample; changes nothing",
    "diff": "where two runs part, or two layouts of the newest model: the first step, rank, module "
    "and tensor that differ by more than round-off; changes nothing",
    "chaos": "make ranks fail on purpose while cells run; without arguments: the report",
    "board": "show the board of the training that runs, else of the last one, or of any run;"
    " looking changes nothing for later cells",
    "animate": "show in motion what the last training did: a step of its pipeline, the ring of its "
    "largest all_reduce, or its parameters in shards",
    "runs": "list this notebook's runs, newest first; with names or numbers, compare these",
    "ui": "start the MLflow UI and show its link",
    "run": "run a script on the ranks, as torchrun would; its names stay there",
    "export": "write the %%distributed cells that succeeded as a script for torchrun",
    "doctor": "check this machine and suggest fixes",
}

# What `%dist chaos` can do to a rank.
FAULTS = {
    "kill": "its process is killed",
    "stop": "it is stopped for 1 s",
    "slow": "it runs at a fifth of its speed for 1 s",
    "raise": "its cell raises an exception",
    "interrupt": "only this rank is interrupted",
}


DEFAULT_STEPS = "3"  # of `--profile`


class _Parser(Parser):
    """argparse that raises one line, and never exits."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {_plainer(message)}  ({self.prog} --help)")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise _HelpShown


class _HelpShown(Exception):
    """`--help` has printed its text; there is nothing more to do."""


def _plainer(message: str) -> str:
    message = message.replace("the following arguments are required", "missing")
    message = re.sub(r"^argument (\S+): takes ", r"\1 takes ", message)  # as ours begin
    return message.removesuffix(", ARGS")  # argparse counts the rest of a line among them


@functools.cache  # to make one takes a millisecond, and each cell needs it
def dist_parser(own: type = NoOptions) -> argparse.ArgumentParser:
    """Return the parser of `%dist`.

    Args:
        own: The options of a launcher of another package, if one is chosen.
    """
    parser = _Parser(prog="%dist", description="Start, stop and look at the ranks.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    made = {
        name: commands.add_parser(name, help=text, description=text, prog=f"%dist {name}")
        for name, text in COMMANDS.items()
    }
    for one in all_options(own).values():
        if one.flag:
            _add_flag(made["start"], one)
    made["attach"].add_argument("name", nargs="?", metavar="NAME", help="name of the cluster")
    made["status"].add_argument(
        "--cost",
        action="store_true",
        help="show what watching the newest training costs, part by part",
    )
    _add_board(made["board"])
    made["animate"].add_argument(
        "what",
        nargs="?",
        default=ANIMATIONS[0],
        choices=ANIMATIONS,
        metavar="WHAT",
        help=f"{', '.join(ANIMATIONS)}; by default {ANIMATIONS[0]}",
    )
    _add_chaos(made["chaos"])
    for name in ("restart", "push", "pull", "stacks", "chaos"):
        _add_ranks(made[name])
    for name in ("push", "pull"):
        made[name].add_argument("names", nargs="+", metavar="NAME")
    made["verify"].add_argument(
        "handle",
        nargs="?",
        metavar="HANDLE",
        help="name of a layout or of its model on the ranks; by default the newest",
    )
    made["probe"].add_argument(
        "--on",
        nargs="+",
        metavar="MACHINE",
        help=f'for a machine that is not here, by presets, such as "{EXAMPLE}": any of '
        f"{', '.join(ACCELERATORS)}; in a host {', '.join(INSIDE_HOSTS)}; between hosts "
        f"{', '.join(BETWEEN_HOSTS)}, with the number of NICs a host before it, or 1",
    )
    made["expect"].add_argument(
        "words",
        nargs="+",
        metavar="ASSERTION",
        help="; ".join(f"{form}: {text}" for form, text in FORMS).replace("%", "%%")
        + f". Before a name: {', '.join(OVER_STEPS)}, as in max loss < 9",
    )
    _add_advise(made["advise"])
    made["change"].add_argument(
        "values",
        nargs="+",
        type=functools.partial(_parameter, after="change"),
        metavar="KEY=VALUE",
        help="such as lr=0.01",
    )
    made["peek"].add_argument(
        "expression", metavar="EXPR", help="such as model.weight.norm(), with the names of cells"
    )
    made["checks"].add_argument("rule", nargs="?", metavar="NAME", help="name of a rule")
    made["replay"].add_argument(
        "step",
        nargs="?",
        type=int,
        metavar="STEP",
        help="its number; by default the newest that was left out, or else the newest",
    )
    made["replay"].add_argument(
        "--fp32", action="store_true", help="in float32, too: is it the precision?"
    )
    made["replay"].add_argument(
        "--anomaly", action="store_true", help="its backward, too: which operation bursts there?"
    )
    made["replay"].add_argument("--rank", type=int, metavar="R", help="what this rank finds alone")
    made["replay"].add_argument(
        "--one",
        action="store_true",
        help="in one process, too: is it the model and the data, or the layout?",
    )
    made["replay"].add_argument(
        "--from",
        dest="saved",
        metavar="FOLDER",
        help="what a cell with --keep has kept on disk: the folder that it has named, or last; the "
        "model is built again first",
    )
    for name in ("one", "other"):
        made["diff"].add_argument(
            name,
            metavar=name.upper(),
            help='a layout, such as ddp or "fsdp=2 tp=2"; or a run of a cell with --keep, by its '
            "name or its number in %%dist runs",
        )
    made["scale"].add_argument("n", type=int, metavar="N", help="number of ranks")
    made["runs"].add_argument(
        "chosen",
        nargs="*",
        metavar="RUN",
        help="names or numbers of runs to compare; a sweep's name selects its runs",
    )
    made["runs"].add_argument(
        "--sync", action="store_true", help="send runs that are still in the spool"
    )
    made["runs"].add_argument(
        "--to-loss",
        nargs="+",
        metavar="WORD",
        help="LOSS [DEVICE [FILE]]: steps and time in which RUN, or the newest, may come to it, "
        "and the price of such devices, by list or by a price table in TOML (docs/advice.md)",
    )
    made["runs"].add_argument("--plain", action="store_true", help="as text")
    _add_run(made["run"])
    _add_scaling(made["scaling"])
    add_export(made["export"], "numbers of prompts, such as 3,5-8, of the cells to export")
    return parser


def _add_advise(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="FACTORY", help="name of the function that makes it")
    parser.add_argument("batch", metavar="BATCH", help="name of a step's batch; shapes will do")
    add_options(parser)
    parser.add_argument("--loss", metavar="NAME", help="of (outputs, targets)")
    parser.add_argument("--optimizer", metavar="NAME", help="its class, such as torch.optim.SGD")
    parser.add_argument(
        "--run",
        action="store_true",
        help="train some steps as advised on the running ranks, and compare",
    )


def _add_flag(parser: argparse.ArgumentParser, option: Option) -> None:
    kind, *others = option.types
    how: dict[str, Any] = {"type": option.read or kind}
    if option.choices:
        read = functools.partial(read_word, option.name, option.choices)
        how = {"type": read, "choices": option.choices}
    if others:  # True or a word
        how = {"nargs": "?", "const": True}
    elif kind is bool:
        how = {"action": argparse.BooleanOptionalAction if option.default else "store_true"}
    elif get_origin(kind):  # a sequence
        how = {"action": "append", "type": get_args(kind)[0]}
    if option.metavar:
        how["metavar"] = option.metavar
    # None: not given, so that the notebook's default applies.
    text = option.help.replace("%", "%%")
    parser.add_argument(flag_of(option.name), default=None, help=text, **how)


def _add_board(board: argparse.ArgumentParser) -> None:
    board.add_argument(
        "word",
        nargs="?",
        metavar="RUN",
        help="name of a run, or its number in %%dist runs; by default this kernel's last training",
    )
    board.add_argument(
        "view",
        nargs="?",
        metavar="VIEW",
        help="; ".join(f"{name}: {view.HELP}" for name, view in VIEWS.items())
        + "; by default the one that new boards open on: %%config NBDist.view sets it",
    )
    board.add_argument(
        "--run",
        metavar="RUN",
        help="the same as RUN: one word that is a view's name means the view, and this a run",
    )
    board.add_argument(
        "--interactive", action="store_true", help="of earlier versions: boards are, by themselves"
    )


def _add_checks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--guard",
        action="store_true",
        help="leave a step out, on all ranks, where a gradient of any of them is not finite",
    )
    parser.add_argument(
        "--keep",
        action="store_true",
        help="as --guard, and keep the newest steps for %%dist replay STEP; where one is left out "
        "or the cell fails also on disk (samples, weights): %%dist replay --from last; and "
        "sketches of what some steps compute: %%dist diff",
    )
    parser.add_argument(
        "--ignore",
        type=_rules,
        default=(),
        metavar="NAME[,NAME]",
        help="rules on silent mistakes that say nothing of this cell: names of %%dist checks",
    )


def _add_run(run: argparse.ArgumentParser) -> None:
    _add_ranks(run)
    run.add_argument(
        "--run", metavar="NAME", help="name of the MLflow run; by default the script's"
    )
    run.add_argument("--no-track", action="store_true", help="no MLflow run")
    _add_checks(run)
    run.add_argument(
        "-m",
        dest="is_module",
        action="store_true",
        help="PATH is a module's name, such as pkg.train",
    )
    run.add_argument("path", metavar="PATH", help="the script, such as train.py")
    run.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="words for the script"
    )


def add_export(export: argparse.ArgumentParser, cells: str) -> None:
    """Add the words of `%dist export`, which those of `nbdist export` are too."""
    export.add_argument("path", metavar="PATH", help="the script, such as train.py")
    export.add_argument(
        "--format",
        default=TORCHRUN,
        metavar="FORMAT",
        help=f"{TORCHRUN} (default): the script alone; or a job around it: "
        + "; ".join(f"{name}, {text}" for name, text in FORMATS.items()),
    )
    export.add_argument("--cells", metavar="CELLS", help=cells)
    export.add_argument("--skip", metavar="CELLS", help="numbers of cells to leave out")
    export.add_argument(
        "--check",
        action="store_true",
        help="run the script's first step under torchrun, and compare its loss",
    )
    export.add_argument("--force", action="store_true", help="overwrite what is there")
    export.add_argument("--nodes", type=int, metavar="N", help="nodes of the job")
    export.add_argument("--time", metavar="LIMIT", help="time limit of the job, as 2:00:00")
    export.add_argument("--partition", metavar="NAME", help="Slurm's partition")
    export.add_argument(
        "--sbatch", action="append", metavar="LINE", help="more for Slurm, as in %%dist start"
    )


def _add_chaos(chaos: argparse.ArgumentParser) -> None:
    chaos.add_argument(
        "kinds",
        nargs="?",
        type=_kinds,
        default=(),
        metavar="KINDS",
        help=f"off, or some of {','.join(FAULTS)}: "
        + "; ".join(f"{kind}, {text}" for kind, text in FAULTS.items()),
    )
    chaos.add_argument(
        "--every",
        type=read_seconds,
        default=5.0,
        metavar="SECONDS",
        help="seconds of running cells between faults (default: 5)",
    )
    end = chaos.add_mutually_exclusive_group()
    end.add_argument(
        "--for", dest="seconds", type=read_seconds, metavar="SECONDS", help="end after this time"
    )
    end.add_argument("--faults", type=_times, metavar="N", help="end after this many faults")
    chaos.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="random seed; the same seed gives the same faults",
    )


@functools.cache
def distributed_parser() -> argparse.ArgumentParser:
    """Return the parser of `%%distributed`."""
    parser = _Parser(prog="%%distributed", description="Run this cell on the ranks.")
    _add_ranks(parser)
    parser.add_argument("--run", metavar="NAME", help="name of the MLflow run")
    parser.add_argument("--resume", action="store_true", help="continue the newest run of NAME")
    parser.add_argument(
        "-p",
        dest="params",
        action="append",
        default=[],
        type=_parameter,
        metavar="KEY=VALUE",
        help='a Python literal (text in quotes: opt="sgd"), set on the ranks before the cell runs '
        "and logged; a list, as in lr=[1e-3,3e-4], runs the cell once per value, as nested "
        "runs, and several lists once per combination; a tuple is one value",
    )
    parser.add_argument("--no-track", action="store_true", help="no MLflow run for this cell")
    parser.add_argument(
        "--timeout", type=read_seconds, metavar="SECONDS", help="interrupt the cell after this time"
    )
    parser.add_argument(
        "--retry",
        type=_times,
        default=0,
        metavar="N",
        help="when it fails, run it again from where it stopped, at most N times",
    )
    parser.add_argument(
        "--checkpoint",
        type=_every,
        default=0,
        metavar="every=STEPS",
        help="save the training every so many steps; with --retry the cell continues from the "
        "newest checkpoint when what it trained is lost",
    )
    parser.add_argument(
        "--go-on",
        action="store_true",
        help="this is the last failed cell, fixed: its loops continue where they stopped",
    )
    _add_checks(parser)
    _add_dry(parser)
    parser.add_argument(
        "--profile",
        nargs="?",
        const=DEFAULT_STEPS,
        metavar="STEPS",
        help="record all ranks with torch.profiler into one trace: 5 (steps, after 2 to warm up; "
        f"{DEFAULT_STEPS} by default), or just these: 10-14",
    )
    return parser


def parse_dist(line: str, launcher: str = LOCAL) -> argparse.Namespace | None:
    """Return what a `%dist` line asks for; None when it asked for help, which was printed.

    Args:
        line: What follows `%dist`.
        launcher: That of a start which names none.

    Raises:
        UsageError: A word is wrong; one line says what is right.
    """
    split = _SPLIT.get(next(iter(line.split()), ""), shlex.split)
    words = _words("%dist", line, split)
    if not words:
        words = ["status"]
    if words[0] == "help":
        words = [*words[1:2], "--help"]
    if not words[0].startswith("-") and words[0] not in COMMANDS:
        close = get_close_matches(words[0], COMMANDS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"it is one of {', '.join(COMMANDS)}."
        raise UsageError(f"%dist has no command {words[0]!r}; {hint}")
    own = _own_options(words, launcher) if words[0] == "start" else NoOptions
    asked = _parse(dist_parser(own), words, command=words[0])
    return _of_board(asked) if asked is not None and asked.command == "board" else asked


def parse_distributed(line: str) -> argparse.Namespace | None:
    """Return what a `%%distributed` line asks for; None when it asked for help.

    Raises:
        UsageError: A word is wrong; one line says what is right.
    """
    asked = _parse(distributed_parser(), _words("%%distributed", line, split_line))
    if asked is not None and not asked.dry and (asked.n is not None or asked.memory is not None):
        flag = "-n" if asked.n is not None else "--memory"
        raise UsageError(f"%%distributed: {flag} is for --dry.  (%%distributed --help)")
    return asked


def parser_of(magic: str, command: str = "") -> argparse.ArgumentParser | None:
    """Return the parser of a magic, or of one command of `%dist`; None where there is none."""
    if magic == "%%distributed":
        return distributed_parser()
    if magic != "%dist" or not command:
        return dist_parser() if magic == "%dist" else None
    known = dist_parser()._subparsers
    assert known is not None
    choices: Any = known._group_actions[0].choices
    parser: argparse.ArgumentParser | None = choices.get(command)
    return parser


def _own_options(words: Sequence[str], launcher: str) -> type:
    """Return the options of the launcher that a start's words name, if another package has it."""
    parser = _Parser(prog="%dist start", add_help=False)
    parser.add_argument("--launcher", default=launcher)
    name = parser.parse_known_args(words)[0].launcher
    if name not in OWN:  # the flags of those are there for any start
        with contextlib.suppress(UsageError):  # there is no such launcher: the start says so
            return find_options(name)
    return NoOptions


def _of_board(asked: argparse.Namespace) -> argparse.Namespace:
    """Return a board's `run` and `view`: a single word is a view where one has that name."""
    word, view, run = asked.word, asked.view, asked.run
    if word is not None and view is None and (run is not None or word in VIEWS):
        word, view = None, word
    if word is not None and run is not None:
        raise UsageError(f"%dist board: {word!r} and --run both name a run.  (%dist board --help)")
    if view is not None:
        require_view(view)
    asked.run, asked.view = (word if run is None else run), view
    return asked


def _add_scaling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "cell", nargs="?", metavar="CELL", help="number of its prompt, or "
        "HANDLE: a layout or model that it trains; by default the newest that has trained",
    )  # fmt: skip
    parser.add_argument(
        "-n", type=_numbers_of_ranks, metavar="N,N", help="numbers of ranks, such as 1,2,4; by "
        "default 1, 2, 4 and so on to those of the cluster",
    )  # fmt: skip
    parser.add_argument(
        "--steps", type=int, default=12, metavar="K", help="that each makes; the first 2 are left "
        "out, 12 by default",
    )  # fmt: skip
    parser.add_argument(
        "--weak", action="store_true", help="weak scaling, too: with batches of nbdist.loader that "
        "grow with the ranks",
    )  # fmt: skip
    parser.add_argument(
        "--on", nargs="+", metavar="LINK", help="over this link, too, or over those of a machine: "
        "ib400, or 8 h100 nvlink4, 2 hosts ib400",
    )  # fmt: skip
    parser.add_argument(
        "--what-if", action="store_true", help="what changes would make of the newest training's "
        "step, what they cost, and what that rests on; runs nothing",
    )  # fmt: skip


def _add_ranks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-r", "--ranks", default="all", metavar="RANKS", help="all, 0, 0,2 or 1-3")


def _add_dry(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dry",
        action="store_true",
        help="run nothing: say whether the cell would come to its end on all ranks, or what would "
        "hang or differ, at which line; needs no cluster",
    )
    parser.add_argument(
        "-n", type=int, metavar="N", help="with --dry: ranks; by default as many as there are"
    )
    parser.add_argument(
        "--memory", metavar="SIZE", help="with --dry: what a rank's tensors may take: 80GB"
    )


def _as_typed(line: str) -> list[str]:
    """Return the words of an assertion with their quotes, but for those around all of it."""
    words = shlex.split(line, posix=False)
    return shlex.split(line) if len(words) == 2 else words


def _with_quotes(line: str) -> list[str]:
    """Return the words of values, whose quotes tell what they are."""
    return shlex.split(line, posix=False)


def _one_expression(line: str) -> list[str]:
    """Return the command and all that follows it as one word."""
    command, *rest = line.split(None, 1)
    asks = bool(rest) and rest[0].strip() in ("-h", "--help")
    return [command, *(rest if asks else ["--", *rest])]


_SPLIT = {"expect": _as_typed, "change": _with_quotes, "peek": _one_expression}


def _words(magic: str, line: str, split: Callable[[str], list[str]]) -> list[str]:
    try:
        return split(drop_comment(line))
    except ValueError as error:
        raise UsageError(f"{magic}: {error} in {line.strip()!r}.") from None


def _parse(
    parser: argparse.ArgumentParser, words: Sequence[str], *, command: str = ""
) -> argparse.Namespace | None:
    try:
        asked, unknown = parser.parse_known_args(words)
    except _HelpShown:
        return None
    if unknown:  # argparse would name the magic, and not the command whose words these are
        knows = parser_of("%dist", command) if command else None
        knows = knows or parser
        knows.error(f"unrecognized arguments: {' '.join(unknown)}")
    return asked


def _parameter(word: str, after: str = "-p") -> tuple[str, Any]:
    try:
        return read_param(word, after)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _kinds(text: str) -> tuple[str, ...]:
    if text == "off":
        return ("off",)
    kinds = tuple(text.split(","))
    unknown = [kind for kind in kinds if kind not in FAULTS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"unknown fault {unknown[0]!r}; use {', '.join(FAULTS)}, or off"
        )
    return kinds


def _rules(text: str) -> tuple[str, ...]:
    try:
        return require_rules(text.split(","))
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _every(text: str) -> int:
    name, is_given, steps = text.partition("=")
    if name != "every" or not is_given or not steps.isdecimal() or not int(steps):
        raise argparse.ArgumentTypeError(f"takes every=STEPS, such as every=100, not {text!r}")
    return int(steps)


def _numbers_of_ranks(text: str) -> tuple[int, ...]:
    words = text.split(",")
    if not all(word.isdecimal() and int(word) for word in words):
        raise argparse.ArgumentTypeError(f"takes numbers of ranks, such as 1,2,4, not {text!r}")
    return tuple(sorted(set(map(int, words))))


def _times(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"takes a number of times, not {text!r}")
    return int(text)
