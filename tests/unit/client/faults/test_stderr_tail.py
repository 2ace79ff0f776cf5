"""What a dead rank wrote last."""

from pathlib import Path

from nbdist.client.faults.stderr_tail import (
    MOST_LINES,
    LastOutput,
    StderrReader,
    read,
    telling_lines,
)
from nbdist.shared import origins
from tests.unit.shared.test_gpu_errors import ASSERT, EMBEDDING


def test_only_what_was_written_since_counts(tmp_path: Path) -> None:
    file = tmp_path / "rank-1.stderr"
    file.write_text("a warning of this morning\n")
    words = StderrReader(tmp_path, [0, 1])
    assert words.of(1) == LastOutput()
    with file.open("a") as more:
        more.write("terminate called after throwing an instance of 'std::bad_alloc'\n")
    assert words.of(1).lines == ("terminate called after throwing an instance of 'std::bad_alloc'",)


def test_a_rank_without_a_file_has_said_nothing(tmp_path: Path) -> None:
    assert StderrReader(tmp_path, [0]).of(0) == LastOutput()


def test_a_file_that_was_emptied_meanwhile_is_read_from_its_beginning(tmp_path: Path) -> None:
    file = tmp_path / "rank-0.stderr"
    file.write_text("x" * 1000)
    words = StderrReader(tmp_path, [0])
    file.write_text("corrupted size vs. prev_size\n")
    assert words.of(0).lines == ("corrupted size vs. prev_size",)


def test_of_a_crash_report_the_first_lines_tell_most_and_else_the_last() -> None:
    report = ["noise", "Fatal Python error: Segmentation fault", "", *map(str, range(20))]
    assert telling_lines(list(report)) == (
        "Fatal Python error: Segmentation fault",
        *map(str, range(MOST_LINES - 1)),
    )
    assert telling_lines(list(map(str, range(20)))) == ("15", "16", "17", "18", "19")


def test_the_cause_of_an_abort_stands_above_its_report() -> None:
    report = [
        "a warning of this morning",
        "terminate called after throwing an instance of 'gloo::EnforceNotMet'",
        "  what():  [enforce fail at pair.cc:456] op.preamble.length <= op.nbytes. 36 vs 16.",
        "Fatal Python error: Aborted",
        "",
        "Extension modules: numpy._core._multiarray_umath, torch._C (total: 40)",
    ]
    assert telling_lines(list(report)) == tuple(report[1:4])
    glibc = ["a warning of this morning", "double free or corruption (out)", *report[3:]]
    assert telling_lines(list(glibc)) == tuple(glibc[1:3])


def test_a_long_text_of_an_exception_leaves_room_for_the_report() -> None:
    text = ["terminate called after ...", *["what"] * 6, "Fatal Python error: Aborted", "Thread"]
    shown = telling_lines(list(text))
    assert len(shown) == MOST_LINES
    assert shown[0] == "terminate called after ..."


# As C++ and faulthandler write it on a rank with a GPU.
FRAMES = "".join(
    f"frame #{i}: <unknown function> + 0x1 (0x7f in /x/libc.so.6)\n" for i in range(12)
)
THROWN = (
    f"terminate called after throwing an instance of 'c10::AcceleratorError'\n  what():  {ASSERT}"
)
CELL = f"/tmp/{origins.CELLS}/{origins.cell_file_name('train(3)')}"
EARLIER = f"/tmp/{origins.CELLS}/{origins.cell_file_name('def train(n): ...')}"
ABORTED = (
    f"{THROWN}{FRAMES}\nFatal Python error: Aborted\n\nStack (most recent call first):\n"
    f'  File "{origins.__file__}", line 5 in backward\n'
    f'  File "{EARLIER}", line 8 in train\n'
    f'  File "{CELL}", line 2 in <module>\n'
)
CELLS = {origins.cell_file_name("train(3)"): 7}


def test_an_abort_on_a_gpu_is_told_with_its_assertion_and_the_cells_line() -> None:
    said = read(f"{EMBEDDING}\n" * 5000 + ABORTED, CELLS)
    assert said.place == "cell 7, line 2"
    assert said.gpu is not None
    assert said.gpu.said == "Assertion `srcIndex < srcSelectDimSize` failed"
    assert said.lines == (
        "terminate called after throwing an instance of 'c10::AcceleratorError'",
        "  what():  CUDA error: device-side assert triggered",
        "Fatal Python error: Aborted",
        "Stack (most recent call first):",
        f'  File "{EARLIER}", line 8 in train',
    )


def test_a_crash_in_a_file_of_the_users_is_placed_there() -> None:
    crash = f'Fatal Python error: Aborted\n  File "/home/me/model.py", line 3 in f\n{ABORTED[-60:]}'
    assert read(crash, CELLS).place == "model.py, line 3"


def test_without_its_own_line_no_place_is_named() -> None:
    assert read(ABORTED, {}).place == ""
    assert read("Fatal Python error: Aborted\n", CELLS).place == ""


def test_what_was_written_before_another_end_explains_nothing() -> None:
    killed = read(f"{ASSERT}\n", CELLS)
    crashed = read(f"{ASSERT}\nFatal Python error: Segmentation fault\n", CELLS)
    assert killed.gpu is None
    assert crashed.gpu is None


def test_a_line_that_was_cut_at_the_beginning_names_no_file_by_halves(tmp_path: Path) -> None:
    words = StderrReader(tmp_path, [0])
    (tmp_path / "rank-0.stderr").write_text(f"{EMBEDDING}\n" * 9000 + ABORTED)
    said = words.of(0)
    assert said.gpu is not None
    assert "(Indexing.cu:1422)" in said.gpu.why
