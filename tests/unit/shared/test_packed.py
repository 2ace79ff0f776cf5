"""How a step's collectives are packed for the wire."""

import json

from nbdist.shared.packed import Calls, Packer, Template

TEMPLATE = Template("all_reduce", "3", "group dp", (0, 2), 4096, "float32", "cell 7, line 3")
MESSAGE = Template("send", "0", "the default group", (0, 1), 8, "int64", "", peer=1)


def test_what_was_packed_comes_out_on_the_other_side() -> None:
    packer = Packer(base_ns=1_000_000)
    packer.call(0, 17, (1_000_500, 1_000_700, 1_900_000), 1_950_000)
    packer.wait(1_000_600, 1_900_000)
    calls = Calls(
        packer.base_ns, {0: TEMPLATE, 1: MESSAGE}, packer.calls, packer.waits, 2, 2_000_000
    )

    found = Calls.from_wire(json.loads(json.dumps(calls.to_wire())))

    assert found == calls
    assert found.calls.tolist() == [0, 17, 5, 7, 9000, 9500]
    assert found.waits.tolist() == [6, 9000]


def test_moments_that_lie_too_far_are_clamped() -> None:
    packer = Packer(base_ns=10**9)
    packer.call(0, 1, (0, 10**9, 10**12))
    assert packer.calls.tolist() == [0, 1, 0, 0, 2**32 - 1, 0]
