"""What ranks inherit of the kernel's environment."""

import pytest

from nbdist.client.cluster.launchers.helper_process import rank_environment


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("error", "default"),
        ("e", "default"),
        ("error::UserWarning,ignore::FutureWarning", "default::UserWarning,ignore::FutureWarning"),
        ("ignore", "ignore"),
        ("", ""),
    ],
)
def test_warnings_that_are_errors_are_only_shown_on_ranks(given: str, kept: str) -> None:
    assert rank_environment({"PYTHONWARNINGS": given})["PYTHONWARNINGS"] == kept


def test_who_has_set_no_warnings_gets_none() -> None:
    assert "PYTHONWARNINGS" not in rank_environment({})


@pytest.mark.parametrize(
    ("given", "seed"),
    [({}, "0"), ({"PYTHONHASHSEED": "random"}, "0"), ({"PYTHONHASHSEED": "7"}, "7")],
)
def test_ranks_have_one_hash_seed_the_notebooks_where_it_has_one(
    given: dict[str, str], seed: str
) -> None:
    assert rank_environment(given)["PYTHONHASHSEED"] == seed
