"""`%dist advise` takes names of the notebook, and says what is wrong before anything runs."""

import pytest

from nbdist.client.notebook import advise_command, arguments
from nbdist.shared.errors import UsageError

NAMES = {"make": lambda: None, "batch": (), "os": pytest}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("advise nothing batch --on '8 h100'", 'no "nothing" in this notebook'),
        ("advise make batch --loss os.nothing --on '8 h100'", 'no "os.nothing" in this notebook'),
        ("advise make batch", "needs a machine: no ranks are running"),
        ("advise make batch --on '8 h100' --run", "--run is for the running ranks"),
        ("advise make batch --on '8 foo'", 'no accelerator is called "foo"'),
    ],
)
def test_what_is_wrong_is_said_in_one_error(line: str, said: str) -> None:
    asked = arguments.parse_dist(line, "local")
    assert asked is not None
    with pytest.raises(UsageError, match=said):
        advise_command.advise(asked, NAMES)
