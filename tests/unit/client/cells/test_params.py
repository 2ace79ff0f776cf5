"""What a cell may be given with `-p`."""

import ast
from pathlib import Path

import pytest

import nbdist
from nbdist.client.cells.params import require_params
from nbdist.shared.errors import UsageError
from nbdist.shared.wire import NAMES_OF_A_RANK


@pytest.mark.parametrize("name", sorted(NAMES_OF_A_RANK))
def test_a_name_that_cells_find_on_the_rank_is_refused_in_a_line(name: str) -> None:
    with pytest.raises(UsageError, match=f"-p {name} would replace what cells find") as refused:
        require_params({"lr": 0.1, name: 5})
    assert "\n" not in str(refused.value)


def test_the_names_that_are_refused_are_those_that_a_rank_sets() -> None:
    boot = ast.parse((Path(nbdist.__file__).parent / "engine/rank/boot.py").read_text())
    (call,) = [
        node
        for node in ast.walk(boot)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith("user_ns.update")
        and any(keyword.arg == "rank" for keyword in node.keywords)
    ]
    assert {keyword.arg for keyword in call.keywords} == NAMES_OF_A_RANK


@pytest.mark.parametrize("name", ["lambda", "a b", "1x", ""])
def test_what_python_takes_for_no_name_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="not a name that Python allows"):
        require_params({name: 1})
