"""Lines of `%dist` reach the session with what the notebook has."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import traitlets
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from nbdist.client.notebook import current
from nbdist.client.notebook.magics import NBDist


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.warn_venv = False
    shell = InteractiveShell.instance(config=config)
    shell.register_magics(NBDist)
    yield shell
    InteractiveShell.clear_instance()


def test_a_push_within_a_function_finds_its_own_names_and_the_notebooks(
    shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed: dict[str, object] = {}
    session = SimpleNamespace(push=lambda values, ranks: pushed.update(values))
    monkeypatch.setattr(current, "current", lambda: session)
    done = shell.run_cell(
        "q, r = 1, 2\n"
        "def send():\n"
        "    r = 3\n"
        "    get_ipython().run_line_magic('dist', 'push q r')\n"
        "send()"
    )
    assert done.success
    assert pushed == {"q": 1, "r": 3}


@pytest.mark.parametrize("line", ["probe --on 8 h100, 2 hosts ib400", 'probe --on "1 T4"'])
def test_a_machine_is_looked_at_without_ranks(
    shell: InteractiveShell, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    shell.run_line_magic("dist", line)
    shown = capsys.readouterr().out
    assert "From presets: nothing of it was measured." in shown
    assert "%dist start, and it is compared with the ranks here." in shown


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("n", -5, "n is the number of ranks, at least 1, not -5."),
        ("device", "tpu", 'device is "cpu" or "cuda", not \'tpu\'.'),
        ("view", "stpe", "The board has no view 'stpe'; did you mean step?"),
        ("timeout", 0.0, "timeout is a number of seconds above 0, not 0.0."),
        ("peer_snapshots", -1, "peer_snapshots is a number of steps, 0 for never, not -1."),
        ("nodes", 0, "nodes must be at least 1, not 0."),
        ("checks", {"same-sample": "off"}, "There is no rule 'same-sample'; did you mean same-sam"),
        ("launcher", "nobody", "There is no launcher 'nobody'."),
    ],
)
def test_a_default_that_no_start_could_take_is_refused_where_it_is_given(
    shell: InteractiveShell, name: str, value: object, sentence: str
) -> None:
    magics = shell.magics_manager.registry["NBDist"]
    before = getattr(magics, name)
    with pytest.raises(traitlets.TraitError) as refused:
        setattr(magics, name, value)
    assert str(refused.value).startswith(sentence)
    shell.run_line_magic("config", f"NBDist.{name} = {value!r}")
    assert getattr(magics, name) == before


def test_a_default_of_any_launcher_can_be_given_before_the_launcher(
    shell: InteractiveShell,
) -> None:
    magics = shell.magics_manager.registry["NBDist"]
    given = {"nodes": 2, "hosts": "a:2", "image": "a:1", "device": "cuda", "n": 3, "quiet": 0.0}
    for name, value in given.items():
        setattr(magics, name, value)
    assert {name: getattr(magics, name) for name in given} == given
