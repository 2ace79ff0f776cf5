"""How a process has ended: the value that crosses between processes, and its words."""

import json

import pytest

from nbdist.shared.processes.ended import Ended, EndKind

OOM = Ended(EndKind.OOM_KILLER, 9, detail="memory limit 512 MiB")
LOST = Ended(EndKind.HOST_LOST, host="node-b", detail="no beat for 4 s")


@pytest.mark.parametrize(
    ("ended", "words"),
    [
        (Ended.from_status(3), "exit code 3"),
        (Ended.from_status(0), "exit code 0"),
        (Ended.from_status(-11), "killed by SIGSEGV"),
        (Ended.from_status(-250), "killed by signal 250"),
        (OOM, "killed by the kernel's OOM killer (memory limit 512 MiB)"),
        (Ended(EndKind.OOM_KILLER, 9), "killed by the kernel's OOM killer"),
        (LOST, "its host node-b is lost: no beat for 4 s"),
        (Ended(EndKind.UNSEEN), "it ended unseen, after the process that had started it"),
        (Ended(EndKind.SIGNAL, 9, because="it hung"), "killed by SIGKILL, because it hung"),
    ],
)
def test_each_kind_of_end_has_its_words(ended: Ended, words: str) -> None:
    assert str(ended) == words


def test_that_nothing_speaks_for_the_oom_killer_is_not_said_to_people() -> None:
    searched = Ended(EndKind.SIGNAL, 9, detail="no sign of the kernel's OOM killer")
    assert str(searched) == "killed by SIGKILL"


def test_a_detail_that_reads_like_another_end_does_not_change_the_kind() -> None:
    named = Ended(EndKind.EXIT_CODE, 1, detail="killed by the kernel's OOM killer")
    assert str(named) == "exit code 1"


@pytest.mark.parametrize("ended", [OOM, LOST, Ended.from_status(-9), Ended(EndKind.UNSEEN)])
def test_an_end_comes_through_json_as_it_was(ended: Ended) -> None:
    assert Ended.from_wire(json.loads(json.dumps(ended.to_wire()))) == ended
