"""What is left out of what C++ libraries print."""

from nbdist.noise import without_noise

NAMELESS = (
    "[W1124 12:49:54.804890510 socket.cpp:207] [c10d] The hostname of the client socket cannot be "
    "retrieved. err=-3\n"
)
OTHER = "[W1124 12:49:54.804890510 socket.cpp:462] [c10d] waitForInput: poll timed out\n"


def test_a_connection_from_an_address_without_a_name_is_not_told() -> None:
    assert without_noise(f"before\n{NAMELESS}{NAMELESS}after") == "before\nafter"


def test_other_warnings_are_told() -> None:
    assert without_noise(f"{NAMELESS}{OTHER}") == OTHER
    assert without_noise(f"I read: {NAMELESS}") == f"I read: {NAMELESS}"
