"""How scaling reads: what was measured, what is a forecast, and what limits either."""

from dataclasses import replace

from nbdist.study.forecast import fit
from nbdist.study.links import LINKS
from nbdist.study.scaling import points
from nbdist.study.scaling_report import Scaling, notes_of
from tests.unit.study.planted import planted

WORLDS = tuple(planted(n, "strong") for n in (1, 2))
MODEL = fit(WORLDS, "strong")


def report() -> Scaling:
    return Scaling(
        "strong",
        WORLDS,
        points(WORLDS, "strong"),
        (MODEL.predict(4),),
        (MODEL.predict(4, LINKS["ib400"]),),
        notes_of(WORLDS, "strong", is_known=True),
    )


def test_a_forecast_is_labelled_with_its_band_and_its_link() -> None:
    measured, here, there = str(report()).split("Forecast, ")
    assert "±" not in measured
    assert here.startswith(
        "each rank on cores of its own, link as measured (latency 500 us, 100 MB/s)"
    )
    assert "link 400 Gbit InfiniBand" in there
    assert "±" in here
    assert "±" in there


def test_weak_scaling_stands_in_the_same_table() -> None:
    worlds = tuple(planted(n, "weak") for n in (1, 2))
    weak = Scaling("weak", worlds, points(worlds, "weak"), notes=("Both.", "Weak."))
    said = str(replace(report(), beside=weak, notes=("Both.",))).splitlines()
    assert said[0] == "Strong scaling, measured:"
    at = said.index("Weak scaling, measured:")
    assert [line.split()[0] for line in said[at + 1 :]] == ["1", "2", "Both.", "Weak."]
    assert len({line.index(" ms") for line in (*said[2:4], *said[at + 1 : at + 3])}) == 1


def test_what_efficiency_is_lost_to_stands_beside_it() -> None:
    line = str(report()).splitlines()[3]
    assert line.split()[0] == "2"
    assert "communication" in line
    assert "serial part" in line


def test_cores_that_limit_ranks_are_named() -> None:
    few = replace(planted(4, "strong"), cores=2, starved_s=0.03)
    (_, said) = notes_of([*WORLDS, few], "strong", is_known=True)
    assert said.startswith("4 ranks have cores for 2 of them")
    assert "cores limit them" in said
    (_, said) = notes_of([*WORLDS, replace(few, starved_s=0.0)], "strong", is_known=True)
    assert said == "4 ranks have cores for 2 of them, and wait for these 0 % of a step."


def test_samples_that_were_not_counted_are_an_assumption() -> None:
    assert "taken for weak scaling" in notes_of(WORLDS, "weak", is_known=False)[0]


def test_one_number_of_ranks_is_compared_with_none() -> None:
    four = (planted(4, "strong"),)
    head, _, line = str(Scaling("strong", four, points(four, "strong"))).splitlines()
    assert head == "Measured:"
    assert line.split()[0] == "4"
    assert line.split()[-2:] == ["–", "–"]
    assert "compared with none" in notes_of(four, "weak", is_known=False)[0]
