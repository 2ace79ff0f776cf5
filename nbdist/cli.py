"""The `nbdist` command: `demo | lab | ui | status | stop | export | advise | doctor` and more.

Imports nothing heavy: each command brings what it needs when it is called, so that `--help`
answers at once and works in an environment that is broken.
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from nbdist.shared.errors import NBDistError, UsageError, install
from nbdist.shared.options import Parser

STATE_FOLDER = Path(".nbdist")  # in the folder in which a notebook runs
LAB_COPY = Path("nbdist-tutorials")  # in the folder one stands in

_PACKAGE = Path(__file__).resolve().parent
_STOP_TIMEOUT_S = 10.0
_OWN = ("export", "estimate", "advise")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status; errors of nbdist are printed, not raised.

    Args:
        arguments: The words after `nbdist`; those of this process by default.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    rest: list[str] = []
    if words[:1] and words[0] in _OWN:  # a parser of its own reads the rest: that costs imports
        words, rest = words[:1], words[1:]
    parser = build_parser()
    known, others = parser.parse_known_args(words)
    if others and known.command != "lab":
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    try:
        match known.command:
            case "demo":
                return demo()
            case "lab":
                return lab(others, with_tutorials=known.tutorials)
            case "ui":
                return ui(known.folder)
            case "status" | "stacks" | "checks" | "board" | "stop":
                return ask(known)
            case "pause" | "continue" | "change" | "peek":
                return ask(known)
            case "export":
                return export(rest)
            case "estimate" | "advise":
                return foresee(known.command, rest)
            case "doctor":
                return doctor()
            case _:
                parser.print_help()
                return 2
    except NBDistError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's words."""
    parser = Parser(
        prog="nbdist", description="Train PyTorch models on several ranks from a notebook."
    )
    parser.add_argument("--version", action="version", version=f"nbdist {version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands.add_parser("demo", help="train on two CPU ranks, headless, and show the run")
    lab_words = commands.add_parser(
        "lab",
        help="JupyterLab in this folder; --tutorials: with a copy of the tutorials",
        description="JupyterLab in this folder. Other words go to JupyterLab.",
    )
    lab_words.add_argument(
        "--tutorials",
        action="store_true",
        help=f"copy the tutorials into {LAB_COPY} here, where they are not yet, and open that",
    )
    ui_words = commands.add_parser("ui", help="the MLflow UI of the runs in this folder")
    ui_words.add_argument(
        "folder",
        nargs="?",
        type=Path,
        default=STATE_FOLDER,
        metavar="FOLDER",
        help="where the runs are kept (default: %(default)s)",
    )
    asking = {
        "status": "show each rank of the clusters that run",
        "stacks": "show where each rank is, also while a cell runs",
        "checks": "list the rules on silent mistakes, and what they found in the newest cell",
        "board": "show the board of the cell that trains, or has trained last",
        "pause": "let the training stand still, all ranks after the same step",
        "continue": "let a training go on that is paused",
        "change": "set lr, or a -p parameter, on all ranks after the same step",
        "peek": "evaluate an expression on all ranks after the same step of the cell that runs",
        "stop": "end all ranks; what they hold is lost",
    }
    for name, help_text in asking.items():
        words = commands.add_parser(name, help=help_text)
        words.add_argument("--pid", type=int, help="the notebook's kernel, where there are several")
        words.add_argument(
            "--on", metavar="HOSTS", help="ask on these hosts over ssh, such as a,b: your notebooks"
        )
        if name == "stop":
            words.add_argument(
                "name", nargs="?", metavar="NAME", help="of a detached cluster, as status lists it"
            )
        if name == "change":
            words.add_argument("values", nargs="+", metavar="KEY=VALUE", help="such as lr=0.01")
        if name == "peek":
            words.add_argument("expression", metavar="EXPR", help='such as "model.weight.norm()"')
        if name == "stacks":
            words.add_argument(
                "-r", "--ranks", default="all", help="all, 0, 0,2 or 1-3 (default: %(default)s)"
            )
        if name == "board":
            words.add_argument(
                "view", nargs="?", default="overview", help="as of %%dist board (%(default)s)"
            )
            words.add_argument("--png", type=Path, metavar="FILE", help="write its picture there")
            words.add_argument(
                "--watch", action="store_true", help="again every 3 s until the cell ends"
            )
    commands.add_parser(
        "export", help="write a notebook's %%%%distributed cells as a script for torchrun"
    )
    commands.add_parser(
        "estimate", help="what each rank of a layout would hold and send, of module:function"
    )
    commands.add_parser(
        "advise", help="which layout trains module:function best on a machine, and why"
    )
    commands.add_parser("doctor", help="check this machine and suggest fixes")
    return parser


def version() -> str:
    """Return nbdist's version, also where it runs from a folder of sources."""
    try:
        return importlib.metadata.version("nbdist")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def notebooks_folder() -> Path:
    """Return the folder of the tutorials: the repository's, or the copy inside the package.

    Raises:
        NBDistError: The package was built without them.
    """
    for folder in (_PACKAGE / "_notebooks", _PACKAGE.parent / "notebooks"):
        if folder.is_dir():
            return folder
    raise NBDistError(
        "The tutorial notebooks are missing.",
        why=f"neither {_PACKAGE}/_notebooks nor {_PACKAGE.parent}/notebooks exists.",
        do="install nbdist again.",
    )


def demo() -> int:
    """Run the demo in the current folder; see `nbdist.demo`."""
    need("nbclient", "sklearn")
    from nbdist.demo import run_demo

    return run_demo(notebooks_folder(), STATE_FOLDER)


def lab(words: Sequence[str], *, with_tutorials: bool) -> int:
    """Become JupyterLab in the current folder, opened on the tutorials where they are in it.

    Args:
        words: For JupyterLab.
        with_tutorials: Put a copy of them into this folder; without, nothing is written to it.

    Raises:
        NBDistError: The folder cannot be written to.
    """
    need("jupyterlab")
    here, source = Path.cwd(), notebooks_folder().resolve()
    command = [sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={here}"]
    if source.parent == here.resolve():  # a clone of the repository
        command.append(f"--LabApp.default_url=/lab/tree/{source.name}")
    elif with_tutorials:
        copy_notebooks(source, here / LAB_COPY)
        command.append(f"--LabApp.default_url=/lab/tree/{LAB_COPY}")
    elif not (here / LAB_COPY).exists():
        print(f"nbdist lab --tutorials copies the tutorials into {LAB_COPY} here.", flush=True)
    os.execv(sys.executable, [*command, *words])


def copy_notebooks(source: Path, target: Path) -> Path:
    """Copy the notebooks that `target` lacks; what is there may hold somebody's work."""
    try:
        target.mkdir(exist_ok=True)
        for notebook in sorted(source.glob("*.ipynb")):
            copy = target / notebook.name
            if not copy.exists():
                shutil.copyfile(notebook, copy)
    except OSError as error:
        raise NBDistError(
            f"The tutorials cannot be copied into {target}.",
            why=error.strerror or str(error),
            do="cd to a folder of yours.",
        ) from error
    return target


def ui(folder: Path) -> int:
    """Serve the MLflow UI of the runs in `folder` on loopback until Ctrl-C."""
    if not folder.is_dir():
        raise NBDistError(
            f"There are no runs in {folder.absolute()}.",
            why="a notebook keeps its runs in the folder .nbdist beside it.",
            do="nbdist ui PATH/.nbdist, or nbdist demo to make a run here.",
        )
    from nbdist.client.tracking.shipping.ui import OPEN_TO_ALL, start_ui

    # The server must not outlive us, however we end: a closed terminal, a SIGTERM.
    guard = [sys.executable, "-m", "nbdist.shared.processes.lifeline", str(os.getpid())]
    url, process = start_ui(folder, wrap=guard)
    print(f"MLflow UI: {url}", flush=True)
    if process is None:  # runs go to a server, which has a UI of its own
        return 0
    print(f"{OPEN_TO_ALL}\nCtrl-C ends it.", flush=True)
    try:
        return int(process.wait())
    except KeyboardInterrupt:
        return 0
    finally:
        stop_group(process)


def stop_group(leader: "subprocess.Popen[bytes]") -> None:
    """End a process and all of its group, by force when asking has not helped."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: a group of zombies
            os.killpg(leader.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            leader.wait(_STOP_TIMEOUT_S)


def ask(known: argparse.Namespace) -> int:
    """Ask a cluster of this user's, and print its answer; see `shared/processes/terminal`."""
    from nbdist import elsewhere
    from nbdist.shared.processes import terminal

    if known.on is not None:
        print(elsewhere.ask(known.on, words_for_there(known)))
        return 0
    match known.command:
        case "status":
            print(terminal.status(known.pid))
        case "stacks":
            print(terminal.stacks(known.pid, known.ranks))
        case "checks":
            print(terminal.checks(known.pid))
        case "pause":
            print(terminal.pause(known.pid))
        case "continue":
            print(terminal.go_on(known.pid))
        case "change":
            print(terminal.change(known.pid, known.values))
        case "peek":
            print(terminal.peek(known.pid, known.expression))
        case "board" if known.watch:
            with contextlib.suppress(KeyboardInterrupt):
                terminal.watch(known.pid, known.view, known.png, show_anew)
        case "board":
            print(terminal.board(known.pid, known.view, known.png)[0])
        case _:
            print(terminal.stop(known.pid, known.name))
    return 0


def words_for_there(known: argparse.Namespace) -> list[str]:
    """Return the words of a command that asks, as another host is to hear them.

    Raises:
        UsageError: The command writes a file, or watches.
    """
    if getattr(known, "png", None) or getattr(known, "watch", False):
        raise UsageError("--on goes with neither --png nor --watch; use ssh HOST nbdist board.")
    words = [known.command]
    if known.pid is not None:
        words += ["--pid", str(known.pid)]
    if known.command == "stacks":
        words += ["--ranks", known.ranks]
    if getattr(known, "name", None):
        words.append(known.name)
    words += getattr(known, "values", None) or []
    words += ["--", known.expression] if known.command == "peek" else []
    if known.command == "board":
        words.append(known.view)
    return words


def show_anew(said: str) -> None:
    """Print `said` on an empty screen, or below what was said before where there is none."""
    if sys.stdout.isatty():
        print(f"\x1b[2J\x1b[H{said}", flush=True)
    else:
        print(f"{said}\n", flush=True)


def export(words: Sequence[str]) -> int:
    """Write a notebook's cells as a script, without a kernel."""
    from nbdist.client.notebook.arguments import add_export
    from nbdist.client.notebook.export_command import export_file

    parser = Parser(
        prog="nbdist export",
        description="Write the %%distributed cells of a notebook as a script for torchrun.",
    )
    parser.add_argument("notebook", metavar="NOTEBOOK", help="the notebook's file")
    add_export(parser, "which code cells, counted from 1, such as 3,5-8")
    export_file(parser.parse_args(words))
    return 0


def foresee(command: str, words: Sequence[str]) -> int:
    """Estimate a layout, or advise one, of a model that a module makes."""
    from nbdist.client.advice import terminal

    (terminal.run_estimate if command == "estimate" else terminal.run_advise)(words)
    return 0


def doctor() -> int:
    """Print what `nbdist.doctor` finds; return 1 when there are problems."""
    from nbdist.doctor import examine, render

    findings = examine()
    print(render(findings))
    return int(any(finding.is_wrong for finding in findings))


def need(*modules: str) -> None:
    """Refuse to go on without the packages of the `notebooks` extra.

    Raises:
        NBDistError: One of `modules` is not installed.
    """
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise NBDistError(
            f"The tutorials need {' and '.join(missing)}.",
            why="nbdist itself does not, so they are optional.",
            do=f"{sys.executable} -m {install('notebooks')}",
        )


if __name__ == "__main__":
    sys.exit(main())
