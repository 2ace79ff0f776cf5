"""`%dist advise` takes names of the notebook, and says what is wrong before anything runs."""

import numpy
import pytest

from nbdist.client.notebook import advise_command, arguments
from nbdist.shared.errors import UsageError

NAMES = {"make": lambda: None, "batch": (), "tensor": numpy.zeros((2, 3)), "os": pytest}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("advise nothing batch --on '8 h100'", 'no "nothing" in this notebook'),
        ("advise make batch --loss os.nothing --on '8 h100'", 'no "os.nothing" in this notebook'),
        ("advise make tensor --loss make --on '8 h100'", "here it is a tensor"),
        ("advise make batch", "needs a machine: no ranks are running"),
        ("advise make batch --on '8 h100' --run", "--run is for the running ranks"),
        ("advise make batch --on '8 foo'", 'no accelerator is called "foo"'),
    ],
)
def test_what_is_wrong_is_said_in_one_error(
    line: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = arguments.parse_dist(line, "local")
    assert asked is not None
    with pytest.raises(UsageError, match=said):
        advise_command.advise(asked, NAMES)
    assert capsys.readouterr().out == ""


def test_a_line_tells_that_estimates_take_a_while(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def advice_for(*_given: object, **_how: object) -> str:
        return capsys.readouterr().out

    monkeypatch.setattr(advise_command, "advice_for", advice_for)
    asked = arguments.parse_dist("advise make batch --on '8 h100'", "local")
    assert asked is not None
    before: object = advise_command.advise(asked, NAMES)
    assert str(before).startswith("Estimating layouts: some seconds each")
