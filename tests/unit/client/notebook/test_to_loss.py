"""What a run would take to come to a loss: `%dist runs --to-loss`."""

from dataclasses import replace
from pathlib import Path

import pytest

from nbdist.client.notebook.arguments import parse_dist
from nbdist.client.notebook.to_loss import to_loss
from nbdist.client.tracking.past.compare import Entry, Figure
from nbdist.shared.errors import UsageError

CURVE = [[step, 2.0 + 3.0 * step**-0.5, 0.0, 0.0] for step in range(1, 400, 2)]
FACTS = {"ranks": "2", "devices": "cpu"}
RUN = Entry("small-gpt", "finished", 400, FACTS, None, Figure(10.0, None), 3600.0, curve=CURVE)


def test_steps_hours_and_the_price_are_told_with_their_band(tmp_path: Path) -> None:
    """900 steps of 3.6 s are 0.9 h, of 2 devices of 2 EUR 3.6 EUR; 1,000 samples take 100 s."""
    table = tmp_path / "prices.toml"
    table.write_text('[ours]\nper_hour = 2\ncurrency = "EUR"\n', encoding="utf-8")
    steps, hours, price, basis = to_loss([RUN], "2.1", "ours", str(table)).split("\n")
    assert steps.startswith("Steps of small-gpt to a loss of 2.1: 9")
    assert steps.endswith("; 400 are made.")
    assert hours.startswith("Hours of all of them on its 2 ranks: 0.9")
    assert price.startswith("Price in EUR: 3.")
    assert f", 0.111 per 1k samples, at 2.00 a device and hour ({table})" in price
    assert price.endswith("as long as on cpu.")
    assert basis.startswith("Predicted, by a power law")


def test_a_loss_that_was_reached_is_not_predicted() -> None:
    """The mean of 10 points lags by half of the steps that they span, and more as it bends."""
    lucky = replace(RUN, curve=[[2, 2.2, 0.0, 0.0], *CURVE[1:]])
    steps, hours, basis = to_loss([lucky], "2.3").split("\n")
    assert steps == "Steps of small-gpt to a loss of 2.3: 111; 400 are made."
    assert hours == "Hours of all of them on its 2 ranks: 0.111."
    assert basis.startswith("Recorded")


def test_without_a_device_no_price_is_made_up() -> None:
    steps, hours, basis = to_loss([RUN], "2.05").split("\n")
    assert "2.05: 3" in steps
    assert hours.startswith("Hours")
    assert "Predicted" in basis


def test_a_loss_below_where_the_curve_tends_to_has_no_price() -> None:
    said, basis = to_loss([RUN], "1.5", "h100").split("\n")
    assert said == "small-gpt comes to no loss of 1.5 on the curve of its 400 steps."
    assert "Predicted" in basis


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--to-loss", "low"], "takes a loss first"),
        (["--to-loss", "2.1", "abacus"], "a device with"),
        (["--to-loss", "2.1", "h100", "none.toml"], "cannot be read"),
        (["--to-loss", "2.1", "h100", "/dev/null", "more"], "takes a loss, a device"),
    ],
)
def test_wrong_words_are_refused(words: list[str], said: str) -> None:
    asked = parse_dist(f"runs {' '.join(words)}")
    assert asked is not None
    with pytest.raises(UsageError, match=said):
        to_loss([RUN], *asked.to_loss)
