"""Tab, Shift+Tab and NameErrors: hooks into IPython's shell that know the magics and the ranks.

Nothing is decided here (see `completion`), and nothing is started: without ranks, only the magics
are known.

Threads: the kernel's main one; that of a subshell, while a cell runs.
"""

import functools
import glob
import logging
import os
import sys
from collections.abc import Iterable
from typing import Any

from nbdist.client.notebook import completion, missing_names
from nbdist.shared import side

log = logging.getLogger(__name__)

_HINT_TIMEOUT_S = 0.1  # an error waits for it


def install(shell: Any) -> None:
    """Add completion, help and the hint to a shell, once."""
    if getattr(shell, "Completer", None) is not None:
        _complete(shell)
    if hasattr(shell, "kernel"):
        _inspect(shell.kernel)
    _explain_name_errors(shell)
    side.notebook.advise_on = functools.partial(_advise_on, shell)


def _complete(shell: Any) -> None:
    from IPython.core.completer import SimpleCompletion, context_matcher

    values = completion.Values(
        runs=_runs,
        ranks=_ranks,
        of_ranks=_of_ranks,
        of_notebook=lambda: _of_notebook(shell),
        metrics=_metrics,
        files=_files,
    )

    @context_matcher()  # type: ignore[untyped-decorator]
    def nbdist_matcher(context: Any) -> Any:
        line, column = context.line_with_cursor, context.cursor_position
        words = completion.complete(line, column, values)
        if words:
            found = [SimpleCompletion(text=word, type="param") for word in words]
            fragment = completion.typed_word(line, column)
            return {"completions": found, "suppress": True, "matched_fragment": fragment}
        above = context.full_text.split("\n")[: context.cursor_line]
        text = "\n".join([*above, line[:column]])
        beginning = completion.layout_at(text, len(text))
        if beginning is not None:
            words = [word for word in _layout_words() if word.startswith(beginning)]
            return {
                "completions": [SimpleCompletion(text=word, type="param") for word in words],
                "suppress": bool(words),
                "matched_fragment": beginning,
            }
        word = completion.word_of_ranks(text, len(text))
        if word is None:
            return {"completions": []}
        path, beginning = word
        names = completion.fitting(_members(path), beginning)
        found = [SimpleCompletion(text=name, type=kind) for name, kind in names.items()]
        # What the notebook has of the same name is another thing; names of the cell itself, and
        # of Python, are not the ranks' yet.
        return {
            "completions": found,
            "suppress": bool(found and path),
            "matched_fragment": beginning,
        }

    shell.Completer.custom_matchers.append(nbdist_matcher)


def _inspect(kernel: Any) -> None:
    """Let Shift+Tab ask the ranks in their cells, and show the help of our magics."""
    ask_kernel = kernel.do_inspect

    @functools.wraps(ask_kernel)
    def do_inspect(code: str, cursor_pos: int, *args: Any, **more: Any) -> Any:
        text = _described(code, cursor_pos)
        if not text:
            return ask_kernel(code, cursor_pos, *args, **more)
        return {"status": "ok", "found": True, "data": {"text/plain": text}, "metadata": {}}

    kernel.do_inspect = do_inspect


def _described(code: str, cursor: int) -> str:
    from IPython.utils.tokenutil import token_at_cursor

    if text := completion.help_at(code, cursor):
        return text
    session = _session()
    if session is None or not completion.is_in_cell(code, cursor):
        return ""
    # The magic's line is no Python: an odd quote in it would hide the cell.
    start = code.index("\n", len(code) - len(code.lstrip())) + 1
    name = token_at_cursor(code[start:], cursor - start)
    described: str = session.rank_names.describe(name) if name else ""
    return described


def _explain_name_errors(shell: Any) -> None:
    """Add a line to the NameError of a plain cell for a name that the ranks have."""
    show = shell.showtraceback

    @functools.wraps(show)
    def show_with_hint(exc_tuple: Any = None, *args: Any, **more: Any) -> Any:
        error = sys.exc_info()[1] if exc_tuple is None else exc_tuple[1]
        try:
            _add_hint(error, shell.user_ns)
        except Exception:
            log.exception("no hint for %r", error)  # the error itself matters more
        return show(exc_tuple, *args, **more)

    shell.showtraceback = show_with_hint


def _add_hint(error: Any, names: dict[str, Any]) -> None:
    if type(error) is not NameError or not error.name or getattr(error, "__notes__", None):
        return
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    is_of_cell = trace is not None and trace.tb_frame.f_globals is names
    if is_of_cell and (line := completion.hint(error.name, _of_ranks(_HINT_TIMEOUT_S))):
        error.add_note(line)


def _advise_on(shell: Any, name: str) -> str:
    """Return how ranks get what the notebook has by a name that they lack; "" where it has none."""
    if name not in _of_notebook(shell):
        return ""
    try:
        return missing_names.advise(name, shell.user_ns[name])
    except Exception:
        log.exception("no advice on %s", name)  # the error itself matters more
        return ""


def _session() -> Any:
    """Return the session that runs, or None; imports nothing."""
    kernel = sys.modules.get("nbdist.client.notebook.current")  # without it nothing runs
    return kernel.current() if kernel is not None and kernel.is_running() else None


def _members(path: str) -> dict[str, str]:
    session = _session()
    return {} if session is None else session.rank_names.members(path)


def _of_ranks(*timeout_s: float) -> Iterable[str]:
    session = _session()
    return () if session is None else session.rank_names.members("", *timeout_s)


def _layout_words() -> Iterable[str]:
    session = _session()
    return () if session is None else session.rank_names.layout_words()


def _files(beginning: str) -> list[str]:
    """Return the files and folders that begin so, as they are typed; `~` stays."""
    whole = os.path.expanduser(beginning)
    found = sorted(glob.glob(f"{glob.escape(whole)}*"))
    return [f"{beginning}{f[len(whole) :]}{'/' if os.path.isdir(f) else ''}" for f in found]


def _of_notebook(shell: Any) -> list[str]:
    hidden = shell.user_ns_hidden
    return [name for name, value in shell.user_ns.items() if hidden.get(name) is not value]


def _ranks() -> list[str]:
    session = _session()
    return [] if session is None else ["all", *map(str, range(session.world_size))]


def _metrics() -> list[str]:
    from nbdist.client.expect.expect import metric_names

    session = _session()
    return [] if session is None else metric_names(session.trained)


def _runs() -> list[str]:
    from nbdist.client.notebook.current import runs

    return list(dict.fromkeys(row.name for row in runs().rows))
