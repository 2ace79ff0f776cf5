"""A refused module raises at its forward, and says why."""

import pytest

torch = pytest.importorskip("torch")

from nbdist.engine.recovery import disabled  # noqa: E402
from nbdist.shared.errors import ClusterError  # noqa: E402


def test_a_refused_module_raises_before_its_other_hooks_run_until_it_is_allowed_again() -> None:
    model, ran = torch.nn.Linear(2, 2), []
    model.register_forward_pre_hook(lambda *_: ran.append("hook"))

    disabled.here.refuse(model, ClusterError("the shards of `model` are lost", do="build it again"))

    for _ in range(2):
        with pytest.raises(ClusterError, match="shards of `model`"):
            model(torch.ones(1, 2))
    assert ran == []
    assert [module for module, _ in disabled.here.refused()] == [model]
    disabled.here.allow(model)
    disabled.here.allow(model)
    model(torch.ones(1, 2))
    assert (ran, disabled.here.refused()) == (["hook"], [])


def test_the_first_refusal_stays() -> None:
    model = torch.nn.Linear(2, 2)
    disabled.here.refuse(model, ClusterError("first"))
    disabled.here.refuse(model, ClusterError("second"))

    assert [str(error) for module, error in disabled.here.refused() if module is model] == ["first"]
