"""What cannot be pushed is refused before anything is sent."""

from typing import Any, cast

import pytest

from nbdist.client.cluster.cluster import Cluster
from nbdist.client.session.transfer import _failed, push
from nbdist.shared.errors import UsageError

NO_CLUSTER = cast("Cluster", None)


@pytest.mark.parametrize("values", ["lr", ["lr"], 0.1])
def test_push_of_what_is_no_dict_says_what_it_takes(values: Any) -> None:
    with pytest.raises(UsageError) as refused:
        push(NO_CLUSTER, values, [0])
    assert refused.value.what == f"push takes a dict of names and their values, not {values!r}."
    assert refused.value.do == 'for example session.push({"lr": 0.1})'


def test_push_of_a_key_that_is_no_name_says_which() -> None:
    for name in (1, "my lr"):
        with pytest.raises(UsageError, match=f"{name!r} is not a name that Python allows"):
            push(NO_CLUSTER, cast("Any", {name: 0.1}), [0])


def test_push_of_what_is_pickled_by_its_name_says_why_and_what_to_do() -> None:
    told = "rank 0: AttributeError: Can't get attribute 'f5' on <module '__main__' (built-in)>"
    failed = _failed("push", told)
    assert failed.what == f"push failed: {told}"
    assert failed.why.startswith("f5 is pickled by its name, as functions of functools.cache are")
    assert failed.do == ("define f5 in a %%distributed cell, or push the function that it wraps")
    assert _failed("push", "rank 0: ValueError: 3").why == ""
