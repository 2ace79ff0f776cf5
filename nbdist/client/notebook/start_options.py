"""The options of a start, of any launcher: one list, of which all that users see is made.

`nbdist.start` takes its signature and its documentation from it, `%dist start` its flags, `%config
NBDist` its traits, the reference its tables. The options of a launcher are in its module;
those of nbdist's launchers are always in the list, another package's once that launcher is chosen.
"""

import inspect
import textwrap
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from inspect import Parameter
from typing import Any, TypeVar

from nbdist.client.board.views import VIEWS, require_view
from nbdist.client.cluster.launchers import kubernetes_manifest, slurm_words
from nbdist.client.cluster.launchers.base import LOCAL, OWN, NoOptions, find_options
from nbdist.client.cluster.launchers.shared_options import HostsOptions
from nbdist.client.metrics.checks.settings import states_of
from nbdist.shared.errors import UsageError
from nbdist.shared.options import (
    BACKENDS,
    DEVICES,
    LOOPBACK,
    ClusterOptions,
    Option,
    choose_options,
    option,
    options_of,
    require_word,
    same_option,
)
from nbdist.study.virtual import with_rates

_THEMES = ("light", "dark", "auto")
_OF_LAUNCHERS = (HostsOptions, slurm_words.Options, kubernetes_manifest.Options)
_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class StartOptions:
    """The options of `nbdist.start`. The help of each field describes it.

    Attributes:
        own: The options of the chosen launcher.

    Raises:
        UsageError: A word is none of those there are.
    """

    n: int | None = option(None, "number of ranks; by default the GPUs, else 2")
    launcher: str = option(
        LOCAL,
        "how ranks are started: local, ssh, slurm, mpi, kubernetes, or one of another package",
        "That is an entry point of `nbdist.launchers`.",
        metavar="NAME",
    )
    own: Any = field(default_factory=NoOptions)
    device: str | None = option(
        None, "cpu or cuda", "By default `cuda` where there are GPUs.", choices=DEVICES
    )
    backend: str | None = option(
        None,
        "gloo or nccl",
        "By default what the device calls for: nccl on GPUs, or gloo where several ranks share "
        "one.",
        choices=BACKENDS,
    )
    timeout: float = same_option(ClusterOptions, "timeout")
    threads: int | None = option(
        None,
        "CPU threads of a rank",
        "By default the cores divided by the ranks.",
        metavar="PER_RANK",
    )
    peer_snapshots: int = same_option(ClusterOptions, "peer_snapshots")
    tracking_uri: str | None = option(
        None,
        "MLflow server",
        "By default `MLFLOW_TRACKING_URI`, else a file beside the notebook.",
        metavar="URI",
    )
    interface: str = option(
        LOOPBACK,
        "address that the cluster binds to; by default 127.0.0.1 (this machine only)",
        "An IPv4 address of this machine, or the name of one of its network interfaces. Elsewhere "
        "than on loopback, nbdist's own messages are encrypted.",
        metavar="ADDRESS_OR_NAME",
    )
    trust_network: bool = option(
        False,
        "required with an --interface that others can reach: torch does not authenticate",
        "Whoever reaches torch's store, gloo or NCCL can read and change tensors.",
    )
    tap: str = same_option(ClusterOptions, "tap")
    hooks: bool = same_option(ClusterOptions, "hooks")
    grad_norm: bool = same_option(ClusterOptions, "grad_norm")
    quiet: float = same_option(ClusterOptions, "quiet")
    check: str = same_option(ClusterOptions, "check")
    virtual: str | None = same_option(ClusterOptions, "virtual")
    theme: str = option(
        "auto",
        "the board's background: light, dark, or auto, readable on both",
        choices=_THEMES,
        flag=False,
    )
    view: str = option(
        "overview",
        f"the view that boards open on: {', '.join(VIEWS)}",
        choices=tuple(VIEWS),
        flag=False,
    )
    checks: str | dict[str, str] = option(
        "warn",
        "what rules on silent mistakes do: off, warn, or raise, which ends the cell; or a dict of "
        "these by the names of rules",
        "In the dict, `all` stands for those that it does not name. `%dist checks` lists them.",
        flag=False,
    )
    detach: bool | str = option(
        False,
        "let the cluster outlive this kernel, for %dist attach in another one; NAME is by default "
        "the notebook's (write it as --detach=NAME)",
        "For the launchers `local` and `ssh`.",
        metavar="NAME",
        trait=False,
    )
    say: Callable[[str], None] | None = option(
        None,
        "gets a line about what is unusual (no forking); `print` by default",
        flag=False,
        trait=False,
    )

    def __post_init__(self) -> None:
        """Refuse words that no start could take; `ClusterOptions` looks at what ranks read."""
        require_view(self.view)
        states_of(self.checks)
        require_word("theme", self.theme, _THEMES)

    @property
    def of_cluster(self) -> dict[str, Any]:
        """The options that `choose_options` takes."""
        mine = {one.name for one in fields(self)}
        same = {f.name: getattr(self, f.name) for f in fields(ClusterOptions) if f.name in mine}
        if isinstance(self.virtual, str):
            same["virtual"] = with_rates(self.virtual)
        return same


def all_options(own: type = NoOptions) -> dict[str, Option]:
    """Return the options of a start in the order in which they are shown.

    Args:
        own: Those of a launcher of another package, if one is chosen.

    Raises:
        UsageError: That has an option of nbdist's with another default.
    """
    general = options_of(StartOptions)
    del general["own"]
    found = {name: general.pop(name) for name in ("n", "launcher")}
    for owner in (*_OF_LAUNCHERS, own):
        its = options_of(owner)
        if other := [n for n in its if n in found and its[n].default != found[n].default]:
            raise UsageError(
                f"The launcher's option {other[0]} has another default than nbdist's own.",
                why="whoever does not give it would give the other one",
                do="give the field of its Options another name",
            )
        found |= its
    return found | general


def read_options(given: Mapping[str, Any]) -> StartOptions:
    """Return what a start is asked for by these values; with its default, an option is not given.

    Raises:
        UsageError: There is no such launcher, or it has no such option.
    """
    launcher = given.get("launcher", LOCAL)
    own = find_options(launcher)
    its, general = options_of(own).keys(), options_of(StartOptions).keys() - {"own"}
    asked = _without_defaults(given)
    if unknown := [name for name in asked if name not in its | general]:
        raise _refusal(launcher, unknown[0], its)
    # A launcher of another package may have one of the general options, too, to know of it.
    of_launcher = own(**{name: asked[name] for name in asked.keys() & its})
    return StartOptions(**{name: asked[name] for name in asked.keys() & general}, own=of_launcher)


def require_value(name: str, value: Any) -> None:
    """Refuse what no start could take as this option, whatever its other options are.

    Raises:
        UsageError: It makes no sense; one sentence says what does.
    """
    launcher, *_ = [*_launchers_with(name), LOCAL]
    asked = read_options({"launcher": launcher, name: value})
    choose_options(asked.n or 1, **asked.of_cluster)


def _launchers_with(name: str) -> list[str]:
    """Return the launchers of nbdist's that have this option of their own."""
    return [one for one in OWN if name in options_of(find_options(one))]


def _without_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what differs from defaults: traits give all options, those of other launchers too."""
    known = all_options()
    plain = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}
    return {
        name: value
        for name, value in plain.items()
        if name not in known or value != known[name].default
    }


def _refusal(launcher: str, name: str, its: Collection[str]) -> UsageError:
    if takers := _launchers_with(name):
        return UsageError(f"{name} is for launcher {' or '.join(takers)}, not {launcher}.")
    close = get_close_matches(name, [*all_options(), *its], n=1, cutoff=0.8)
    hint = f"did you mean {close[0]}? " if close else ""
    return UsageError(
        f"A start with launcher {launcher} has no option {name}.",
        why=f"of its own that launcher has {', '.join(its) or 'none'}",
        do=f"{hint}%dist start --launcher {launcher} --help lists what there is.",
    )


def takes_options(function: _Function) -> _Function:
    """Give a function the signature and documentation of all options, for help and Shift+Tab."""
    own, parameters, lines = inspect.signature(function), [], ["Args:"]
    wrap = textwrap.TextWrapper(100, initial_indent=" " * 8, subsequent_indent=" " * 12)
    for name, one in all_options().items():
        named = Parameter(name, Parameter.KEYWORD_ONLY, default=one.default, annotation=one.hint)
        parameters.append(own.parameters.get(name, named))
        lines += wrap.wrap(f"{name}: {one.text}")
    function.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    described = "\n".join([*lines, "", "    Raises:"])
    function.__doc__ = (function.__doc__ or "").replace("Raises:", described)
    return function
