"""What is measured of real trainings; each file has a cluster of its own."""

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            # Sockets of tornado and asyncio warn of each other's deprecations.
            for category in ("DeprecationWarning", "FutureWarning", "ResourceWarning"):
                item.add_marker(pytest.mark.filterwarnings(f"ignore::{category}"))
