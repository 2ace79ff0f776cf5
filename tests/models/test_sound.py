"""Two hundred sound trainings that were drawn: no rule on silent mistakes says anything of them."""

import pytest

from tests.models import sound
from tests.models.conftest import Said

SEEDS = range(200)
TRAININGS = [sound.draw(seed) for seed in SEEDS]
DRAWN = sound.values_of(TRAININGS)


@pytest.mark.parametrize(
    ("field", "names"),
    [
        ("net", sound.NETS),
        ("layout", sound.LAYOUTS),
        ("optimizer", sound.OPTIMIZERS),
        ("schedule", ["", *sound.BY_STEP, *sound.BY_EPOCH]),
        ("loader", sound.LOADERS),
        ("zeroing", sound.ZEROING),
        ("clipping", sound.CLIPPING),
        ("precision", sound.PRECISIONS),
        ("between", sound.BETWEEN),
        ("stop", sound.STOPS),
        ("extra", sound.EXTRAS),
        ("frozen", sound.FROZEN),
        ("cells", sound.CELLS),
        ("accumulated", (1, 2)),
    ],
)
def test_each_way_to_train_is_drawn(field: str, names: object) -> None:
    assert DRAWN[field] == set(names)  # type: ignore[call-overload]


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", SEEDS)
def test_of_a_sound_training_no_rule_says_anything(said: Said, seed: int) -> None:
    for code in sound.cells(TRAININGS[seed]):
        assert said(code) == {}, code
