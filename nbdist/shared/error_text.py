"""The text of an exception, whatever its `__str__` does: raise, or return 100 MB."""

from typing import Final, Self

MOST_CHARS: Final = 16_000
FAILED: Final = "<exception str() failed>"  # as Python's own tracebacks say


def text_of(error: BaseException) -> str:
    """Return `str(error)`, cut to about `MOST_CHARS`; `FAILED` where it cannot be taken."""
    try:
        text = str(error)
    except BaseException:  # also an interrupt, of one that takes for ever
        return FAILED
    return cut(text)


def named(error: BaseException) -> str:
    """Return e.g. "ValueError: no such file"."""
    return f"{type(error).__name__}: {text_of(error)}"


def cut(text: str) -> str:
    """Return a text that can be sent: without its middle, where it is longer than `MOST_CHARS`.

    A surrogate that stands alone, as in a file's name that is no UTF-8, is written as in a literal.
    """
    if len(text) > MOST_CHARS:
        half = MOST_CHARS // 2
        text = f"{text[:half]}\n[... {len(text) - 2 * half:,} characters ...]\n{text[-half:]}"
    return text.encode(errors="backslashreplace").decode()


class ToldError(Exception):
    """Stands for an exception of the user's where its name and its text are asked for.

    Its class has the other's name, its `__cause__` is the other.
    """

    __notes__: list[str]

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """Read `error`, once."""
        named_alike = type(type(error).__name__, (cls,), {"__module__": type(error).__module__})
        restored: Self = named_alike(text_of(error))
        restored.__cause__ = error
        notes = getattr(error, "__notes__", None)
        if isinstance(notes, list | tuple):
            restored.__notes__ = [cut(note) for note in notes if isinstance(note, str)]
        return restored
