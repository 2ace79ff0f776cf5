"""An estimate beside what was then measured."""

from nbdist.study.beside import Beside, Measured, matching
from nbdist.study.estimate import Estimate, RankEstimate, Traffic

FACTS = {"layout": "zero3", "model": "GPT", "parameters": "1000"}


def of(layout: str = "zero3", model: str = "GPT", count: int = 1000, world: int = 2) -> Estimate:
    sent = {"fsdp": Traffic(count=3, payload=100, nbytes=2e6)}
    return Estimate(layout, world, (RankEstimate(0, peak=10**6, traffic=sent),), model, count)


def test_a_run_is_put_beside_the_newest_estimate_of_its_model_and_layout() -> None:
    older, newer = of(), of()
    assert matching([older, newer, of(layout="ddp")], FACTS, 2) is newer


def test_another_model_layout_or_number_of_ranks_has_no_estimate() -> None:
    assert matching([of(count=999), of(model="T5"), of(world=4)], FACTS, 2) is None


def test_what_was_estimated_and_measured_is_said_in_one_sentence() -> None:
    beside = Beside(of(), Measured([3, 4], 2.1e6, None))
    assert beside.sentence == (
        "Beside nbdist.estimate, a step: collectives 3 (estimated 3), "
        "bytes sent 2.1 MB (estimated 2.0 MB)."
    )


def test_the_memory_of_gpus_stands_beside_the_peak() -> None:
    assert "peak 1.5 MB (estimated 1.0 MB)" in Beside(of(), Measured([3], None, 1.5e6)).sentence


def test_the_file_of_a_run_has_the_whole_estimate_and_both_columns() -> None:
    text = str(Beside(of(), Measured([3], 2e6, None)))
    assert "zero3 on 2 ranks" in text
    assert "estimated  measured" in text
