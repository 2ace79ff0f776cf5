"""What is measured of real trainings; each file has a cluster of its own.

One worker runs these last, each while the other runs no test (`tests/groups.py`). Where something
else takes the cores meanwhile, a measurement is made anew: a wrong one is wrong each time.
"""

import pytest

from tests.groups import tests_below


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in tests_below(__file__, items):
        item.add_marker(pytest.mark.flaky(reruns=4, only_rerun="AssertionError"))
        # Sockets of tornado and asyncio warn of each other's deprecations.
        for category in ("DeprecationWarning", "FutureWarning", "ResourceWarning"):
            item.add_marker(pytest.mark.filterwarnings(f"ignore::{category}"))
