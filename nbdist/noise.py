"""What C++ libraries print that tells a person nothing, and is left out. Pure."""

import re

# torch's, of each connection from an address without a name: most clusters have no reverse DNS.
_NAMELESS = "The hostname of the client socket cannot be retrieved"
# A kernel's assertion, of each thread in which it fails: thousands of lines that are alike.
_THREAD = r"block: \[[^\]\n]*\], thread: \[[^\]\n]*\] "
_ASSERTED = "Assertion `"
_ASSERTIONS = re.compile(
    rf"^(?P<first>(?P<where>[^\n]*: ){_THREAD}(?P<said>{_ASSERTED}[^\n]*` failed\.))"
    rf"(?:\n(?P=where){_THREAD}(?P=said))+$",
    re.MULTILINE,
)
_NAMELESS_LINE = re.compile(rf"^\[W[^\n]*\[c10d\] {_NAMELESS}[^\n]*\n?", re.MULTILINE)


def without_noise(text: str) -> str:
    """Return what a descriptor was written, without such lines; of alike ones the first stays."""
    if _NAMELESS in text:
        text = _NAMELESS_LINE.sub("", text)
    return _ASSERTIONS.sub(_once, text) if _ASSERTED in text else text


def _once(found: re.Match[str]) -> str:
    more = found.group().count("\n")
    return f"{found['first']} (and so in {more:,} more thread{'' if more == 1 else 's'})"
