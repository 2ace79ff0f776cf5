"""What is measured of gradients decides whether a plan is right."""

import pytest

from nbdist.engine.layout.axes.tp import gradients
from nbdist.engine.layout.axes.tp.cuts import COLUMN, COPIED, Cut, TensorPlan
from nbdist.shared.errors import LayoutError

PLAN = TensorPlan("a test", (Cut("attn.q", COLUMN, ""), Cut("attn.k", COPIED, "")))


def test_a_key_that_is_whole_on_each_rank_has_gradients_that_are_summed() -> None:
    gradients.check_copied(PLAN, {"attn.k.weight": True, "norm.weight": False})


def test_a_key_whose_gradient_each_rank_has_whole_is_refused_by_name() -> None:
    with pytest.raises(LayoutError, match=r"attn\.k\.bias would get a wrong gradient"):
        gradients.check_copied(PLAN, {"attn.k.weight": True, "attn.k.bias": False})
