"""Samples that were left out: counted, named, and forgotten where a loader goes back."""

from nbdist.engine.data.position.left_out import MOST_KEPT, LeftOut, Skipped


def skipped(*samples: int, epoch: int = 0) -> list[Skipped]:
    return [Skipped(epoch, sample, "ValueError: bad") for sample in samples]


def test_what_lies_behind_the_position_of_a_fault_is_forgotten() -> None:
    left = LeftOut()
    left.add(8, skipped(3))
    left.add(16, skipped(5, 7))
    left.add(0, skipped(3, epoch=1))
    left.go_back(0, 16)
    assert ([one.sample for one in left.all()], left.count) == ([3], 1)


def test_a_notice_tells_what_is_new_once() -> None:
    left = LeftOut()
    assert left.take_notice(1) == ""
    left.add(8, skipped(*range(12)))
    said = left.take_notice(1)
    assert "rank 1 left out 12 samples of the dataset (0, 1, 2, 3, 4, 5, 6, 7 and 4 more)" in said
    assert "ValueError: bad" in said
    assert left.take_notice(1) == ""


def test_what_is_kept_is_bounded_and_the_count_goes_on() -> None:
    left = LeftOut()
    left.add(0, skipped(*range(MOST_KEPT + 5)))
    assert (len(left.all()), left.count) == (MOST_KEPT, MOST_KEPT + 5)


def test_a_reason_of_several_lines_is_told_as_one_sentence() -> None:
    left = LeftOut()
    left.add(0, [Skipped(0, 4, "OSError: no\nheader.")])
    assert left.take_notice(0).endswith("because of OSError: no header. loader.skipped names them.")
