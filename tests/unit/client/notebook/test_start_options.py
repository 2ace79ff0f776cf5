"""What a start can be asked for, in Python, on a magic's line and as a default."""

import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest

import nbdist
from nbdist.client.cluster.launchers import base, kubernetes_manifest, slurm_words
from nbdist.client.cluster.launchers.shared_options import HostsOptions
from nbdist.client.notebook.arguments import parse_dist, parser_of
from nbdist.client.notebook.magics import NBDist
from nbdist.client.notebook.start_options import StartOptions, all_options, read_options
from nbdist.shared import options
from nbdist.shared.errors import UsageError
from nbdist.shared.options import ClusterOptions, flag_of, options_of

TAKEN = {
    "n": None,
    "launcher": "local",
    "hosts": "",
    "nodes": None,
    "gpus_per_node": None,
    "partition": "",
    "time": "",
    "sbatch": (),
    "image": "",
    "namespace": "",
    "pod_template": "",
    "pod_wait": 20.0,
    "device": None,
    "backend": None,
    "timeout": 1800.0,
    "threads": None,
    "tracking_uri": None,
    "interface": "127.0.0.1",
    "trust_network": False,
    "tap": "full",
    "hooks": True,
    "grad_norm": False,
    "quiet": 10.0,
    "virtual": None,
    "check": "shared",
    "peer_snapshots": 0,
    "theme": "auto",
    "view": "overview",
    "checks": "warn",
    "detach": False,
    "say": None,
}
NO_TRAIT = {"detach", "say"}
FLAGS = set(TAKEN) - {"tap", "hooks", "grad_norm", "quiet", "check", "theme", "view", "say"}
FLAGS -= {"checks"}
MODULE = """
from dataclasses import dataclass
from nbdist.shared.options import option

@dataclass(frozen=True)
class Options:
    queue: str = option("", "mine: where the job waits")
    spot: bool = True
    tags: tuple[str, ...] = ()
    cores: int | None = None
    device: str | None = None

def make_launcher(logs, asked):
    return logs, asked
"""


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Install a package that offers the launcher `mine`, with options of its own."""
    (tmp_path / "launcher_of_mine.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    entry = EntryPoint("mine", "launcher_of_mine:make_launcher", base.GROUP)
    monkeypatch.setattr(base, "entry_points", lambda *, group: EntryPoints([entry]))
    yield
    sys.modules.pop("launcher_of_mine", None)


def asked(line: str, launcher: str = "local") -> dict[str, Any]:
    """Return what a line of `%dist start` gives."""
    words = parse_dist(f"start {line}", launcher)
    assert words is not None
    return {name: value for name, value in vars(words).items() if value is not None}


def start_help() -> str:
    """Return the help of a start, whose launcher is one of nbdist's."""
    parser = parser_of("%dist", "start")
    assert parser is not None
    return parser.format_help()


def test_a_start_takes_these_options_with_these_defaults() -> None:
    parameters = inspect.signature(nbdist.start).parameters
    assert {name: one.default for name, one in parameters.items()} == TAKEN
    kinds = {name: one.kind for name, one in parameters.items()}
    assert kinds.pop("n") is inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert set(kinds.values()) == {inspect.Parameter.KEYWORD_ONLY}


def test_every_option_has_a_help_text_that_the_documentation_of_a_start_shows() -> None:
    shown = re.sub(r"\s+", " ", inspect.getdoc(nbdist.start) or "")
    for name, option in all_options().items():
        assert option.help, name
        assert not option.help.endswith("."), name
        assert f" {name}: {option.text}" in shown


def test_flags_and_traits_are_those_options() -> None:
    flags = {name for name, option in all_options().items() if option.flag}
    assert flags == FLAGS
    assert all(flag_of(name) in start_help() for name in flags)
    traits = NBDist.class_traits(config=True)
    assert {name: one.default() for name, one in traits.items()} == {
        name: [] if name == "sbatch" else default
        for name, default in TAKEN.items()
        if name not in NO_TRAIT
    }
    assert traits["nodes"].allow_none
    assert not traits["hosts"].allow_none


def test_the_list_has_the_options_of_all_launchers_of_nbdist() -> None:
    of_launchers = [options_of(base.find_options(name)) for name in base.OWN]
    general = options_of(StartOptions).keys() - {"own"}
    assert set().union(*of_launchers) == set(TAKEN) - general


def test_what_ranks_read_can_be_asked_of_a_start_by_the_same_name() -> None:
    asked = {field.name for field in fields(ClusterOptions) if field.metadata}
    assert asked
    assert asked <= options_of(StartOptions).keys()


def test_an_option_with_another_default_than_nbdists_of_that_name_is_refused() -> None:
    @dataclass(frozen=True)
    class Others:
        nodes: int = options.option(7, "how many")

    with pytest.raises(UsageError, match="nodes has another default than nbdist's own"):
        all_options(Others)


def test_a_launcher_gets_its_own_options_and_all_get_the_general_ones() -> None:
    read = read_options(
        {"n": 4, "launcher": "slurm", "nodes": 2, "sbatch": ["-A me"], "tap": "off"}
    )
    assert read.own == slurm_words.Options(nodes=2, sbatch=("-A me",))
    assert (read.n, read.tap, read.timeout) == (4, "off", 1800.0)
    assert read_options({"launcher": "mpi", "hosts": "a:2"}).own == HostsOptions(hosts="a:2")
    assert read_options({}).own == base.NoOptions()


def test_options_of_other_launchers_may_have_their_defaults() -> None:
    defaults: dict[str, Any] = {
        name: [] if name == "sbatch" else default for name, default in TAKEN.items()
    }
    read = read_options(defaults | {"launcher": "kubernetes", "image": "a:1"})
    assert read.own == kubernetes_manifest.Options(image="a:1")


@pytest.mark.parametrize(
    ("launcher", "given", "sentence"),
    [
        ("local", {"hosts": "a"}, "hosts is for launcher ssh or mpi, not local."),
        ("ssh", {"nodes": 2}, "nodes is for launcher slurm or kubernetes, not ssh."),
        ("ssh", {"image": "a:1"}, "image is for launcher kubernetes, not ssh."),
        ("kubernetes", {"partition": "a"}, "partition is for launcher slurm, not kubernetes."),
        ("slurm", {"pod_wait": 9}, "pod_wait is for launcher kubernetes, not slurm."),
        ("slurm", {"nodes": 0}, "nodes must be at least 1, not 0."),
    ],
)
def test_an_option_of_another_launcher_is_refused(
    launcher: str, given: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UsageError) as refused:
        nbdist.start(launcher=launcher, **given)
    assert refused.value.what == sentence


@pytest.mark.parametrize("name", ["queue", "own"])
def test_an_option_that_nobody_has_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(UsageError) as refused:
        nbdist.start(launcher="ssh", **{name: "x"})
    assert str(refused.value) == (
        f"A start with launcher ssh has no option {name}.\n"
        "Why: of its own that launcher has hosts\n"
        "Do:  %dist start --launcher ssh --help lists what there is."
    )


def test_a_word_that_is_nearly_an_option_gets_a_suggestion() -> None:
    with pytest.raises(UsageError, match="did you mean gpus_per_node"):
        nbdist.start(gpu_per_node=2)


@pytest.mark.usefixtures("offered")
def test_a_launcher_of_another_package_brings_its_options_to_python_and_to_the_line() -> None:
    line = "--launcher mine --queue long --no-spot --tags a --tags b --cores 3 --device cpu -n 2"
    given = asked(line)
    command = given.pop("command")
    assert command == "start"
    read = read_options(given)
    own = base.find_options("mine")
    assert read.own == own(queue="long", spot=False, tags=("a", "b"), cores=3, device="cpu")
    assert (read.n, read.device) == (2, "cpu")


@pytest.mark.usefixtures("offered")
def test_a_launcher_that_is_the_notebooks_default_brings_its_options_too() -> None:
    assert asked("--queue long", launcher="mine")["queue"] == "long"


@pytest.mark.usefixtures("offered")
def test_the_help_of_a_chosen_launcher_shows_its_options(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert parse_dist("start --launcher mine --help") is None
    assert "mine: where the job waits" in capsys.readouterr().out
    assert "--queue" not in start_help()


@pytest.mark.usefixtures("offered")
def test_options_of_another_packages_launcher_are_for_no_other() -> None:
    with pytest.raises(UsageError, match="unrecognized arguments: --queue long"):
        parse_dist("start --launcher ssh --queue long")
    with pytest.raises(UsageError, match="nodes is for launcher slurm or kubernetes, not mine"):
        nbdist.start(launcher="mine", nodes=2)


def test_a_launcher_that_is_not_there_is_left_to_the_start() -> None:
    assert asked("--launcher nobody -n 2")["launcher"] == "nobody"
    with pytest.raises(UsageError, match="There is no launcher 'nobody'"):
        nbdist.start(launcher="nobody")
