"""A kernel that has imported what is too old says so, before anything fails by it."""

import pytest
from packaging.requirements import Requirement

from nbdist import UsageError
from nbdist.client.notebook.imported import refuse_too_old, require_new_enough

WANTED = [Requirement(word) for word in ("ipykernel>=7.3,<8", "ipython>=9.1", "torch>=2.11")]


def test_a_kernel_with_an_older_ipython_is_to_be_restarted() -> None:
    with pytest.raises(UsageError) as raised:
        refuse_too_old(WANTED, {"ipykernel": "7.4.0", "ipython": "7.34.0"})

    assert str(raised.value).splitlines() == [
        "This kernel has imported ipython 7.34.0, and nbdist needs ipython>=9.1.",
        "Why: pip replaces packages on disk; a kernel keeps those that it has imported",
        (
            "Do:  restart the kernel, then run its cells again. If this comes again: "
            "%pip install 'ipython>=9.1', and restart once more"
        ),
    ]


@pytest.mark.parametrize("version", ["6.17.1", "6.31.0", "7.4.0"])
def test_a_kernel_may_be_of_ipykernel_6_for_ranks_are_new_processes(version: str) -> None:
    refuse_too_old(WANTED, {"ipykernel": version, "torch": "2.11.0+cu130"})


def test_a_kernel_of_an_ipykernel_that_was_not_tried_is_refused_for_what_ranks_need_too() -> None:
    with pytest.raises(UsageError, match=r"ipykernel 5\.5\.6.*ipykernel>=6\.17") as raised:
        refuse_too_old(WANTED, {"ipykernel": "5.5.6"})

    assert "%pip install 'ipykernel<8,>=7.3'" in str(raised.value)


def test_what_is_not_imported_yet_is_not_asked() -> None:
    refuse_too_old(WANTED, {})


def test_this_process_has_what_nbdist_needs() -> None:
    require_new_enough()
