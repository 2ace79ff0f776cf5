"""tqdm on a rank: every way to it leads to text."""

import subprocess
import sys

_ON_A_RANK = """
import sys
from nbdist.engine.kernel.output import tqdm_bars

tqdm_bars.install()
assert not any(name.startswith("tqdm") for name in sys.modules), "it loads nothing by itself"
import ipykernel.zmqshell  # by which tqdm knows a notebook
"""


def _run(code: str) -> str:
    """Return what `code` writes on a rank's stderr; in a process of its own, as it imports tqdm."""
    done = subprocess.run(
        [sys.executable, "-c", _ON_A_RANK + code], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_bars_for_notebooks_draw_text_whatever_their_options() -> None:
    said = _run(
        "from tqdm.notebook import tqdm, trange\n"
        "for _ in tqdm(range(5), desc='reading', ncols='100%', display=True): pass\n"
        "for _ in trange(3, leave=False): pass\n"
    )
    assert "reading: 100%" in said
    assert "5/5" in said


def test_tqdm_auto_draws_text_without_a_warning() -> None:
    said = _run(
        "from tqdm.auto import tqdm\n"
        "for _ in tqdm(range(7)): pass\n"
        "assert 'ipywidgets' not in sys.modules\n"
    )
    assert "7/7" in said
    assert "Warning" not in said
