"""What is for the ranks says in the notebook where to call it."""

import pytest

import nbdist
from nbdist import NBDistError
from nbdist.shared import side


@pytest.mark.parametrize(
    "call",
    [
        "log(loss=0.5)",
        "keep(scheduler=None)",
        "loader([1, 2], global_batch=2)",
        "init()",
        "save()",
        "restore()",
        "coverage()",
        "parallelize(print, 'ddp')",
        "from_pretrained('here', 'ddp')",
    ],
)
def test_what_is_for_ranks_says_in_the_notebook_where_to_call_it(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side, "_here", "notebook")
    with pytest.raises(NBDistError) as raised:
        eval(f"nbdist.{call}", {"nbdist": nbdist})
    assert "%%distributed" in raised.value.do


def test_a_script_may_be_on_either_side() -> None:
    side.require_rank("nbdist.log")
    side.require_notebook("nbdist.start")
