"""What a dead rank wrote last."""

from pathlib import Path

from nbdist.client.faults.stderr_tail import MOST_LINES, LastWords, telling_lines


def test_only_what_was_written_since_counts(tmp_path: Path) -> None:
    file = tmp_path / "rank-1.stderr"
    file.write_text("a warning of this morning\n")
    words = LastWords(tmp_path, [0, 1])
    assert words.of(1) == ()
    with file.open("a") as more:
        more.write("terminate called after throwing an instance of 'std::bad_alloc'\n")
    assert words.of(1) == ("terminate called after throwing an instance of 'std::bad_alloc'",)


def test_a_rank_without_a_file_has_said_nothing(tmp_path: Path) -> None:
    assert LastWords(tmp_path, [0]).of(0) == ()


def test_a_file_that_was_emptied_meanwhile_is_read_from_its_beginning(tmp_path: Path) -> None:
    file = tmp_path / "rank-0.stderr"
    file.write_text("x" * 1000)
    words = LastWords(tmp_path, [0])
    file.write_text("corrupted size vs. prev_size\n")
    assert words.of(0) == ("corrupted size vs. prev_size",)


def test_of_a_crash_report_the_first_lines_tell_most_and_else_the_last() -> None:
    report = ["noise", "Fatal Python error: Segmentation fault", "", *map(str, range(20))]
    assert telling_lines("\n".join(report)) == (
        "Fatal Python error: Segmentation fault",
        *map(str, range(MOST_LINES - 1)),
    )
    assert telling_lines("\n".join(map(str, range(20)))) == ("15", "16", "17", "18", "19")


def test_the_cause_of_an_abort_stands_above_its_report() -> None:
    report = [
        "a warning of this morning",
        "terminate called after throwing an instance of 'gloo::EnforceNotMet'",
        "  what():  [enforce fail at pair.cc:456] op.preamble.length <= op.nbytes. 36 vs 16.",
        "Fatal Python error: Aborted",
        "",
        "Extension modules: numpy._core._multiarray_umath, torch._C (total: 40)",
    ]
    assert telling_lines("\n".join(report)) == tuple(report[1:4])
    glibc = ["a warning of this morning", "double free or corruption (out)", *report[3:]]
    assert telling_lines("\n".join(glibc)) == tuple(glibc[1:3])


def test_a_long_text_of_an_exception_leaves_room_for_the_report() -> None:
    text = ["terminate called after ...", *["what"] * 6, "Fatal Python error: Aborted", "Thread"]
    shown = telling_lines("\n".join(text))
    assert len(shown) == MOST_LINES
    assert shown[0] == "terminate called after ..."
