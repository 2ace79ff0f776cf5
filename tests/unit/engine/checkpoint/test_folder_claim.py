"""Of two saves that begin the same folder at once, one goes on at most."""

import itertools

import pytest

from nbdist.engine.checkpoint.folder import CLAIM_ATTEMPTS, FolderClaim

# Each of two stakes its claim and then looks: all orders of these four.
ORDERS = sorted(set(itertools.permutations(["first", "first", "second", "second"])))


def claim(files: set[str]) -> FolderClaim:
    return FolderClaim(lambda: set(files), files.add, files.discard)


@pytest.mark.parametrize("order", ORDERS, ids=", ".join)
def test_never_do_two_saves_believe_to_be_alone(order: tuple[str, ...]) -> None:
    files: set[str] = set()
    claims = {"first": claim(files), "second": claim(files)}
    staked: set[str] = set()
    alone = []
    for who in order:
        if who not in staked:
            claims[who].stake()
            staked.add(who)
        elif claims[who].is_alone():
            alone.append(who)
    assert len(alone) <= 1


def test_a_folder_in_which_another_writes_is_left_as_it_is() -> None:
    files = {"writing.json"}
    assert not claim(files).take(pause=lambda _: None)
    assert files == {"writing.json"}


def test_a_save_that_met_another_s_claim_takes_the_folder_when_that_is_withdrawn() -> None:
    files = {"claim-other"}
    mine = claim(files)
    assert mine.take(pause=lambda _: files.discard("claim-other"))
    assert files == {mine.file}


def test_a_claim_that_stays_is_another_s_folder() -> None:
    files = {"claim-other"}
    pauses: list[float] = []
    assert not claim(files).take(pauses.append)
    assert files == {"claim-other"}
    assert len(pauses) == CLAIM_ATTEMPTS
