"""What cannot be pushed is refused before anything is sent."""

from typing import Any, cast

import pytest

from nbdist.client.cluster.cluster import Cluster
from nbdist.client.session.transfer import push
from nbdist.errors import UsageError

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
