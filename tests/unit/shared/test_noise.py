"""What is left out of what C++ libraries print."""

from nbdist.shared.text import without_noise

NAMELESS = (
    "[W1124 12:49:54.804890510 socket.cpp:207] [c10d] The hostname of the client socket cannot be "
    "retrieved. err=-3\n"
)
OTHER = "[W1124 12:49:54.804890510 socket.cpp:462] [c10d] waitForInput: poll timed out\n"
ASSERTION = (
    "/pytorch/Indexing.cu:1422: indexSelectLargeIndex: block: [{},0,0], thread: [{},0,0] "
    "Assertion `srcIndex < srcSelectDimSize` failed."
)


def test_a_connection_from_an_address_without_a_name_is_not_told() -> None:
    assert without_noise(f"before\n{NAMELESS}{NAMELESS}after") == "before\nafter"


def test_other_warnings_are_told() -> None:
    assert without_noise(f"{NAMELESS}{OTHER}") == OTHER
    assert without_noise(f"I read: {NAMELESS}") == f"I read: {NAMELESS}"


def test_an_assertion_that_fails_in_thousands_of_threads_is_told_once_with_their_number() -> None:
    lines = [ASSERTION.format(block, thread) for block in range(40) for thread in range(64)]
    text = "\n".join(["before", *lines, "after", ""])
    assert without_noise(text) == f"before\n{lines[0]} (and so in 2,559 more threads)\nafter\n"


def test_different_assertions_are_each_told() -> None:
    one, other = ASSERTION.format(1, 2), ASSERTION.format(1, 2).replace("srcIndex", "dstIndex")
    assert without_noise(f"{one}\n{other}\n") == f"{one}\n{other}\n"
    assert without_noise(f"{one}\n{one}\n{other}\n") == (
        f"{one} (and so in 1 more thread)\n{other}\n"
    )
