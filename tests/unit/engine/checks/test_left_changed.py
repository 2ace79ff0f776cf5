"""What a cell leaves changed is told, unless the notebook's own code names it."""

import contextlib
import gc
import io
import sys
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nbdist.engine.checks.left_changed import LeftChanged, ProcessState

NOTHING: dict[str, float] = {}


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    before = ProcessState.now()
    yield
    torch.set_default_dtype(before.dtype)
    torch.set_grad_enabled(before.grad)
    torch.autograd.set_detect_anomaly(before.anomaly)
    sys.stdout, sys.stderr = before.stdout, before.stderr
    if before.gc:
        gc.enable()


def told(
    change: Callable[[], object],
    source: str = "library.train()",
    names: Mapping[str, Any] = NOTHING,
    *,
    is_script: bool = False,
) -> dict[str, float]:
    """Return what is told of a cell that has made a change."""
    changed = LeftChanged()
    changed.cell_began(is_script=is_script)
    change()
    return changed.in_cell(source, names)


def to_bfloat16() -> None:
    torch.set_default_dtype(torch.bfloat16)


TO_BFLOAT16 = {"dtype": 2.0, "dtype_before": 0.0, "script": 0.0}


def test_each_change_is_told() -> None:
    assert told(to_bfloat16) == TO_BFLOAT16
    assert told(gc.disable) == {"gc_off": 1, "script": 0}
    assert told(lambda: torch.set_grad_enabled(False)) == {"grad_off": 1, "script": 0}
    assert told(lambda: torch.autograd.set_detect_anomaly(True)) == {"anomaly_on": 1, "script": 0}


def test_what_was_so_before_and_what_is_put_back_is_not() -> None:
    to_bfloat16()
    gc.disable()
    assert told(lambda: None) == {}
    assert told(gc.enable) == {}


def test_a_call_that_puts_the_dtype_back_is_not() -> None:
    changed = LeftChanged()
    said = []
    for dtype in (torch.bfloat16, torch.float32, torch.bfloat16):
        changed.cell_began(is_script=False)
        torch.set_default_dtype(dtype)
        said.append(changed.in_cell("library.train()", NOTHING))
    assert said == [TO_BFLOAT16, {}, TO_BFLOAT16]


def test_a_call_that_changes_what_a_cell_has_set_is_told() -> None:
    changed = LeftChanged()
    changed.cell_began(is_script=False)
    to_bfloat16()
    assert changed.in_cell("torch.set_default_dtype(torch.bfloat16)", NOTHING) == {}
    changed.cell_began(is_script=False)
    torch.set_default_dtype(torch.float32)
    told_of = changed.in_cell("library.train()", NOTHING)
    assert told_of == {"dtype": 0.0, "dtype_before": 2.0, "script": 0.0}


@pytest.mark.parametrize(
    "source",
    [
        "torch.set_default_dtype(torch.bfloat16)",
        "if True:\n    torch.set_default_dtype(torch.bfloat16)",
        "from torch import set_default_dtype as to\nto(torch.bfloat16)",
        "%time torch.set_default_dtype(torch.bfloat16)",
    ],
)
def test_a_cell_that_names_it_means_it(source: str) -> None:
    assert told(to_bfloat16, source) == {}


@pytest.mark.parametrize("source", ["'set_default_dtype'", "x = 1  # set_default_dtype"])
def test_a_text_or_a_comment_names_nothing(source: str) -> None:
    assert told(to_bfloat16, source) == TO_BFLOAT16


def test_a_keyword_of_the_same_name_is_another_thing() -> None:
    assert told(gc.disable, "tqdm(x, disable=True)") == {"gc_off": 1, "script": 0}
    assert told(gc.disable, "gc.disable()") == {}


def in_notebook(source: str) -> dict[str, Any]:
    """Return the names of a cell that has run."""
    names: dict[str, Any] = {"__name__": "__main__", "torch": torch}
    exec(source, names)
    return names


@pytest.mark.parametrize(
    "source",
    [
        "def setup():\n    torch.set_default_dtype(torch.bfloat16)",
        "def outer():\n    def setup():\n        torch.set_default_dtype(torch.bfloat16)",
        "class Trainer:\n    def fit(self):\n        torch.set_default_dtype(torch.bfloat16)",
        "class Trainer:\n    @staticmethod\n    def fit():\n        torch.set_default_dtype(1)",
    ],
)
def test_a_function_of_an_earlier_cell_that_names_it_means_it(source: str) -> None:
    assert told(to_bfloat16, "setup()", in_notebook(source)) == {}


def test_a_function_of_a_module_is_not_the_notebooks_own() -> None:
    assert told(to_bfloat16, "setup()", {"setup": to_bfloat16}) == TO_BFLOAT16


def test_of_a_script_it_is_told_though_its_source_names_it() -> None:
    source = "torch.set_default_dtype(torch.bfloat16)"
    assert told(to_bfloat16, source, is_script=True) == TO_BFLOAT16 | {"script": 1}


def _print_into(stream: Any) -> Callable[[], None]:
    def change() -> None:
        sys.stdout = stream

    return change


def test_a_stream_that_leads_elsewhere_is_told(tmp_path: Any) -> None:
    assert told(_print_into(io.StringIO())) == {"stdout_lost": 1, "script": 0}
    with (tmp_path / "log").open("w") as file:
        assert told(_print_into(file)) == {"stdout_lost": 1, "script": 0}


def test_a_stream_that_writes_to_the_one_before_it_too_is_not() -> None:
    beside = SimpleNamespace(files=[io.StringIO(), sys.stdout], flush=lambda: None)
    assert told(_print_into(beside)) == {}
    around = SimpleNamespace(inner=SimpleNamespace(terminal=sys.stdout))
    assert told(_print_into(around)) == {}


def test_a_stream_into_a_descriptor_whose_text_is_shown_is_not() -> None:
    with open(1, "w", closefd=False) as stream, contextlib.suppress(ValueError):
        assert told(_print_into(stream)) == {}


def test_a_stream_that_raises_at_whatever_is_asked_does_no_harm() -> None:
    class Broken:
        def fileno(self) -> int:
            raise RuntimeError

    assert told(_print_into(Broken())) == {"stdout_lost": 1, "script": 0}


def test_a_cell_whose_text_names_the_stream_means_it() -> None:
    assert told(_print_into(io.StringIO()), "sys.stdout = open('log', 'w')") == {}
