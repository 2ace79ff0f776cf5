"""`%dist` and `%%distributed`: read the line, call the session, show what comes back.

Nothing is decided here. Defaults are traitlets: `%config NBDist`, or `c.NBDist.n = 4` in
`ipython_config.py`.
"""

import re
import sys
from collections.abc import Callable
from typing import Any, Final, get_origin

from IPython.core.magic import Magics, cell_magic, line_magic, magics_class, needs_local_scope
from traitlets import (
    All,
    Bool,
    Dict,
    Float,
    Integer,
    List,
    TraitError,
    Unicode,
    Union,
    observe,
    validate,
)

from nbdist.client.notebook import arguments, assist, export_command
from nbdist.client.notebook.start_options import all_options, require_value
from nbdist.shared import side
from nbdist.shared.errors import Interrupted, UsageError
from nbdist.shared.options import Option

_TRAITS: Final = {int: Integer, float: Float, bool: Bool, str: Unicode}


def _traits() -> dict[str, Any]:
    """Return the trait of each option that has one, by name."""
    return {name: _trait(one) for name, one in all_options().items() if one.trait}


def _trait(option: Option) -> Any:
    about: dict[str, Any] = {"help": option.text, "allow_none": option.default is None}
    kind, *others = option.types
    trait: Any
    if others:  # a word, or a dict of words
        trait = Union([Unicode(), Dict()], default_value=option.default, **about)
    elif get_origin(kind):
        trait = List(Unicode(), list(option.default), **about)
    else:
        trait = _TRAITS[kind](option.default, **about)
    return trait.tag(config=True)


@magics_class
class NBDist(Magics):
    """The magics of nbdist, and their defaults."""

    launcher: str
    theme: str
    view: str
    checks: str | dict[str, str]
    # What a class's body binds are its attributes: traitlets takes no traits that are added later.
    locals().update(_traits())

    @validate(*_traits())
    def _refuse_what_no_start_takes(self, proposal: Any) -> Any:
        """Refuse a value where it is given, and not at the start only."""
        try:
            require_value(proposal["trait"].name, proposal["value"])
        except UsageError as error:
            raise TraitError(str(error)) from None
        return proposal["value"]

    @observe(All)
    def _say_when_it_counts(self, change: Any) -> None:
        """Say of an option that is changed under a running cluster that it counts later."""
        kernel = sys.modules.get("nbdist.client.notebook.current")  # without it nothing runs
        name = change["name"]
        if name not in self.trait_names(config=True) or kernel is None or not kernel.is_running():
            return
        if name == "view":
            kernel.current().view = change["new"]
        elif name == "checks":
            kernel.current().checks(change["new"])
        else:
            print(f"NBDist.{name} = {change['new']!r} takes effect at the next %dist start.")

    @needs_local_scope
    @line_magic
    def dist(self, line: str, local_ns: dict[str, Any] | None = None) -> Any:
        """Start, stop and look at the ranks. `%dist --help` lists the commands."""
        asked = arguments.parse_dist(line, self.launcher)
        if asked is None:
            return None
        # In a function both: a line there may name what is the notebook's.
        names = {**self._shell.user_ns, **(local_ns or {})}
        command: Callable[[Any, dict[str, Any]], Any] = getattr(self, f"_{asked.command}")
        try:
            return command(asked, names)
        except Interrupted:
            raise
        except KeyboardInterrupt:
            raise Interrupted(f"%dist {asked.command} was stopped.") from None

    @needs_local_scope
    @cell_magic
    def distributed(self, line: str, cell: str, local_ns: dict[str, Any] | None = None) -> None:
        """Run this cell on all ranks. `%%distributed --help` lists the options."""
        asked = arguments.parse_distributed(line)
        if asked is None:
            return
        from nbdist.client.notebook.current import current

        code = _numbered_like_the_notebook(line, cell)
        if asked.dry:
            self._dry(asked, code)
            return
        params = dict(asked.params)
        lists = {key: value for key, value in params.items() if isinstance(value, list)}
        options = {
            "timeout_s": asked.timeout,
            "params": {key: value for key, value in params.items() if key not in lists},
            "run_name": asked.run,
            "track": not asked.no_track,
            "show": True,
            "prompt": self._prompt,
            "retry": asked.retry,
            "profile": asked.profile,
            "guard": asked.guard,
            "keep": asked.keep,
            "ignore": asked.ignore,
        }
        if not lists:
            options |= {
                "resume": asked.resume,
                "go_on": asked.go_on,
                "checkpoint": asked.checkpoint,
            }
            current().run(code, asked.ranks, **options)
        elif asked.checkpoint:
            raise UsageError(
                "%%distributed --checkpoint is for one training, and a list in -p makes several."
            )
        elif asked.go_on:
            raise UsageError(
                "%%distributed --go-on continues one cell, and a list in -p makes several."
            )
        elif asked.resume:
            raise UsageError(
                "%%distributed --resume continues one run, and a list makes several: "
                f"give -p {next(iter(lists))} one value."
            )
        else:
            current().sweep(code, lists, asked.ranks, **options)

    def _dry(self, asked: Any, code: str) -> None:
        """Check a cell that is not run; where no ranks are, on as many as a start would make."""
        from nbdist.client.notebook.current import current, is_running
        from nbdist.client.notebook.dry_command import check_cell

        n = current().world_size if is_running() else getattr(self, "n", None) or 2
        message: dict[str, Any] = getattr(self._shell, "get_parent", dict)() or {}
        cell_id = (message.get("metadata") or {}).get("cellId") or ""
        print(check_cell(asked, code, n, cell_id))

    @property
    def _prompt(self) -> int:
        """The number of the cell that runs: IPython 9 counts before it runs, IPython 8 after."""
        return max(1, int(self._shell.displayhook.prompt_count))

    @property
    def _shell(self) -> Any:
        """IPython's shell, which `Magics` allows to be None."""
        return self.shell

    def _start(self, asked: Any, names: dict[str, Any]) -> None:
        from nbdist.client.notebook.current import start

        defaults = {name: getattr(self, name) for name in self.trait_names(config=True)}
        given = {name: value for name, value in vars(asked).items() if value is not None}
        del given["command"]
        session = start(**defaults | given)
        print(f"Started {session.describe}.")
        if session.detached:
            print(f"It outlives this kernel: %dist attach {session.detached} in another one.")

    def _attach(self, asked: Any, names: dict[str, Any]) -> None:
        from nbdist.client.notebook.attach import attach

        attach(asked.name)

    def _status(self, asked: Any, names: dict[str, Any]) -> None:
        from nbdist.client.notebook.current import current, status

        print(current().cost if asked.cost else status())

    def _stop(self, asked: Any, names: dict[str, Any]) -> None:
        from nbdist.client.notebook.current import current, is_running

        if not is_running():
            print("No ranks are running.")
            return
        session = current()
        session.stop()
        print(" ".join(["Stopped.", *session.unreached]))

    def _restart(self, asked: Any, names: dict[str, Any]) -> None:
        from nbdist.client.notebook.current import current
        from nbdist.shared.text import name_ranks, parse_ranks

        session = current()
        lines = session.restart(asked.ranks)
        chosen = parse_ranks(asked.ranks, session.world_size)
        print("\n".join(lines) or f"New processes for {name_ranks(chosen)}, without variables.")

    def _scale(self, asked: Any, names: dict[str, Any]) -> None:
        from nbdist.client.notebook.current import current

        print("\n".join(current().scale(asked.n)))

    def _retry(self, asked: Any, names: dict[str, Any]) -> None:
        from nbdist.client.notebook.current import current

        current().retry()

    def _push(self, asked: Any, names: dict[str, Any]) -> None:
        from nbdist.client.notebook.current import current

        missing = [name for name in asked.names if name not in names]
        if missing:
            raise UsageError(f"There is no {missing[0]!r} in this notebook to push.")
        current().push({name: names[name] for name in asked.names}, asked.ranks)

    def _pull(self, asked: Any, names: dict[str, Any]) -> None:
        from nbdist.client.notebook.current import current

        session = current()
        values = {name: session.pull(name, asked.ranks) for name in asked.names}
        self._shell.user_ns.update(values)

    def _verify(self, asked: Any, names: dict[str, Any]) -> None:
        from nbdist.client.notebook.current import current

        print(current().verify(asked.handle))

    def _expect(self, asked: Any, names: dict[str, Any]) -> None:
        from nbdist.client.notebook.current import current

        print(current().expect(" ".join(asked.words)))

    def _probe(self, asked: Any, names: dict[str, Any]) -> None:
        from nbdist.client.notebook.current import current, is_running

        if not asked.on:
            print(current().probe())
            return
        from nbdist.study.machine import parse_machine
        from nbdist.study.preset import PresetProbe, median_rates

        machine = parse_machine(" ".join(asked.on))
        here = median_rates(current().compute_rates()) if is_running() else {}
        print(PresetProbe(machine, here))

    def _advise(self, asked: Any, names: dict[str, Any]) -> None:
        from nbdist.client.notebook.advise_command import advise

        print(advise(asked, names))

    def _scaling(self, asked: Any, names: dict[str, Any]) -> None:
        from nbdist.client.notebook import scaling_command
        from nbdist.client.notebook.current import current, is_running

        cells = export_command.here.cells()
        if asked.what_if:
            print(scaling_command.outcomes(asked, current().trained, cells))
            return
        found = scaling_command.scale_out(asked, cells, current().options if is_running() else None)
        print(found)
        if hasattr(self._shell, "kernel"):
            from nbdist.client.board.drawn.scaling_plot import show

            show(found, self.theme)

    def _stacks(self, asked: Any, names: dict[str, Any]) -> None:
        from nbdist.client.notebook.current import current

        print(current().stacks(asked.ranks))

    def _pause(self, asked: Any, names: dict[str, Any]) -> None:
        from nbdist.client.notebook.current import current

        print(current().pause())

    def _continue(self, asked: Any, names: dict[str, Any]) -> None:
        from nbdist.client.notebook.current import current

        print(current().resume())

    def _change(self, asked: Any, names: dict[str, Any]) -> None:
        from nbdist.client.notebook.current import current

        print(current().change(**dict(asked.values)))

    def _peek(self, asked: Any, names: dict[str, Any]) -> None:
        from nbdist.client.notebook.current import current

        print(current().peek(asked.expression))

    def _checks(self, asked: Any, names: dict[str, Any]) -> None:
        from nbdist.client.metrics.checks.page import section_of
        from nbdist.client.metrics.checks.table import Checks
        from nbdist.client.notebook.current import current, is_running

        if asked.rule is not None:
            print(section_of(asked.rule))
        elif is_running():
            print(current().checks())
        else:
            print(Checks(self.checks))

    def _replay(self, asked: Any, names: dict[str, Any]) -> None:
        from nbdist.client.notebook.current import current

        how = {"fp32": asked.fp32, "anomaly": asked.anomaly, "saved": asked.saved}
        print(current().replay(asked.step, **how, rank=asked.rank, one=asked.one))

    def _diff(self, asked: Any, names: dict[str, Any]) -> None:
        from nbdist.client.notebook.current import diff

        found = diff(asked.one, asked.other)
        print(found)
        if hasattr(self._shell, "kernel"):
            from nbdist.client.board.drawn.diff_plot import show

            show(found.curves, " ".join(found.sentences), self.theme)

    def _chaos(self, asked: Any, names: dict[str, Any]) -> None:
        from nbdist.client.notebook.current import current
        from nbdist.client.session.chaos import ChaosPlan
        from nbdist.shared.text import parse_ranks

        session = current()
        if asked.kinds == ("off",):
            chaos = session.stop_chaos()
        elif asked.kinds:
            ranks = parse_ranks(asked.ranks, session.world_size)
            limits = {"for_s": asked.seconds, "faults": asked.faults}
            plan = ChaosPlan(asked.kinds, ranks, asked.every, **limits, seed=asked.seed)
            chaos = session.start_chaos(plan)
        else:
            chaos = session.chaos
        print("%dist chaos has not been started." if chaos is None else chaos)

    def _board(self, asked: Any, names: dict[str, Any]) -> None:
        from nbdist.client.notebook.current import show_board

        show_board(asked.view, asked.run, self.theme, self.view)

    def _animate(self, asked: Any, names: dict[str, Any]) -> Any:
        from nbdist.client.notebook.current import current

        return current().animate(asked.what)

    def _runs(self, asked: Any, names: dict[str, Any]) -> Any:
        from nbdist.client.notebook.current import compare, runs, sync

        if asked.sync:
            print(sync())
        if asked.to_loss:
            from nbdist.client.notebook.to_loss import to_loss

            print(to_loss(compare(asked.chosen or ["1"]).entries, *asked.to_loss))
            return None
        has_pictures = hasattr(self._shell, "kernel") and not asked.plain
        table: Any
        if asked.chosen:
            table = compare(asked.chosen)
            if has_pictures:
                from nbdist.client.board.drawn.compare_plot import show

                show(table, self.theme)
        else:
            table = runs()
        if has_pictures:
            return table
        print(table)
        return None

    def _ui(self, asked: Any, names: dict[str, Any]) -> None:
        from nbdist.client.notebook.current import open_ui

        print("Starting the MLflow UI (a few seconds the first time)...", flush=True)
        print(open_ui())

    def _run(self, asked: Any, names: dict[str, Any]) -> None:
        from nbdist.client.notebook.current import current

        current().run_script(
            asked.path,
            asked.arguments,
            asked.ranks,
            run_name=asked.run,
            track=not asked.no_track,
            show=True,
            prompt=self._prompt,
            is_module=asked.is_module,
            guard=asked.guard,
            keep=asked.keep,
            ignore=asked.ignore,
        )

    def _export(self, asked: Any, names: dict[str, Any]) -> None:
        from nbdist.client.notebook.current import current, is_running

        export_command.export_history(asked, current().options if is_running() else None)

    def _doctor(self, asked: Any, names: dict[str, Any]) -> None:
        from nbdist import doctor
        from nbdist.client.notebook.current import health

        print(doctor.render([*doctor.examine(), *health()]))


def _numbered_like_the_notebook(line: str, cell: str) -> str:
    """Return the cell with its magic as a comment, so that line numbers are the editor's."""
    is_magic = cell.lstrip().startswith("%%")  # before it, only empty lines may stand
    return ("" if is_magic else f"# %%distributed {line}".rstrip()) + f"\n{cell}"


def _refuse_below(line: str) -> None:
    """Raise for `%%distributed` below other lines: there IPython takes it for a line's magic."""
    raise UsageError(
        "%%distributed must be the first line of its cell.",
        do="move what stands above it below, or into another cell",
    )


def _with_body(lines: list[str]) -> list[str]:
    """Give a cell that only asks for `%%distributed --help` a body.

    IPython refuses a cell magic without one before it looks at the magic's options.
    """
    asks = len(lines) == 1 and re.fullmatch(r"\s*%%distributed\s+(-h|--help)\s*", lines[0])
    return [lines[0].rstrip() + "\n", "\n"] if asks else lines


def register(shell: Any) -> None:
    """Register the magics with IPython; loading a second time changes nothing."""
    if "NBDist" in shell.magics_manager.registry:
        return
    shell.register_magics(NBDist)
    shell.register_magic_function(_refuse_below, "line", "%distributed")
    # Texts that cells leave name it: nbdist.current().last[1].show()
    shell.user_ns.setdefault("nbdist", sys.modules["nbdist"])
    # First: the list ends with the step that parses cell magics.
    shell.input_transformers_cleanup.insert(0, _with_body)
    assist.install(shell)
    export_command.watch(shell)
    side.notebook.checkpoints = _checkpoints_folder


def _checkpoints_folder() -> str:
    from nbdist.client.notebook import current

    return current.checkpoints_folder()
