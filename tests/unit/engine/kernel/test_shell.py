"""What a cell on a rank is refused, in words that say where it belongs."""

import pytest
from IPython.core.interactiveshell import InteractiveShell

from nbdist.engine.kernel.ipython.shell import refuse_magics


@pytest.mark.parametrize(
    ("cell", "what", "do"),
    [
        ("%dist push x", "%dist push x is for the notebook", "a cell of its own"),
        ("if True:\n    %dist", "%dist is for the notebook", "a cell of its own"),
        ("x = 1\n%%distributed\nx = 2", "%%distributed is for the notebook", "keep one"),
        ("%%distributed\nx = 1", "%%distributed is for the notebook", "keep one %%distributed"),
    ],
)
def test_magics_of_the_notebook_say_on_a_rank_where_they_belong(
    capsys: pytest.CaptureFixture[str], cell: str, what: str, do: str
) -> None:
    shell = InteractiveShell()
    refuse_magics(shell)
    failed = shell.run_cell(cell).error_in_exec
    capsys.readouterr()
    assert type(failed).__name__ == "UsageError"
    assert what in str(failed)
    assert do in str(failed)
