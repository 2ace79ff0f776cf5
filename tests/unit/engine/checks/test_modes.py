"""Of a model it is told which modules their mode matters to, and how many of them evaluate."""

from torch import Tensor, nn

from nbdist.engine.checks.modes import Modes


class Noisy(nn.Module):
    """A module of a user's own that asks for its mode."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if self.training else x


class Plain(nn.Module):
    """One that does not."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def counts(*modules: nn.Module) -> tuple[float, float]:
    """Return how many modules of a model are modal, and how many of these evaluate."""
    model = nn.Sequential(*modules)
    found = Modes(model).now()
    return found["modal"], found["in_eval"]


def test_modules_that_ask_for_their_mode_are_counted_whoever_wrote_them() -> None:
    assert counts(nn.Dropout(), nn.BatchNorm1d(4), Noisy()) == (3, 0)
    assert counts(nn.Linear(4, 4), nn.LayerNorm(4), nn.ReLU(), Plain()) == (0, 0)


def test_what_evaluates_is_counted_and_what_does_the_same_in_both_modes_is_not() -> None:
    assert counts(nn.BatchNorm1d(4).eval(), nn.Dropout(), nn.Linear(4, 4).eval()) == (2, 1)
    assert counts(nn.Dropout(0.0).eval(), nn.MultiheadAttention(4, 2).eval()) == (0, 0)
    assert counts(nn.MultiheadAttention(4, 2, dropout=0.1).eval()) == (1, 1)


def test_models_with_other_modules_have_other_names_whatever_their_modes() -> None:
    def names(model: nn.Module) -> float:
        return Modes(model).now()["modal_names"]

    first, second = (nn.Sequential(nn.Linear(4, 4), nn.Dropout()) for _ in range(2))
    second.eval()
    other = nn.Sequential(nn.Dropout(), nn.Linear(4, 4))
    assert names(first) == names(second)
    assert names(first) != names(other)
