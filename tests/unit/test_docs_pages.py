"""Pages that the documentation's generator fills in are whole, and made from the code."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from nbdist.client.metrics.checks.page import said_of, section
from nbdist.client.metrics.checks.rules import all_rules

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_silent_mistakes_has_a_section_for_each_rule_in_order(
    generate: ModuleType,
) -> None:
    page = generate.on_page_markdown((DOCS / "checks.md").read_text())
    at = [page.index(section(rule)) for rule in all_rules()]
    assert at == sorted(at)
    assert "<!-- rules -->" not in page
    assert all(said_of(rule) in page for rule in all_rules())


def test_each_state_of_a_rule_is_explained_on_the_page() -> None:
    from nbdist.client.metrics.checks.settings import STATES

    page = (DOCS / "checks.md").read_text()
    assert all(f"| `{state}` |" in page for state in STATES)
