"""Lines of `%dist` reach the session with what the notebook has."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
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
