"""What C++ libraries print that tells a person nothing, and is left out. Pure."""

import re

# torch's, of each connection from an address without a name: most clusters have no reverse DNS.
_NAMELESS = "The hostname of the client socket cannot be retrieved"
_NAMELESS_LINE = re.compile(rf"^\[W[^\n]*\[c10d\] {_NAMELESS}[^\n]*\n?", re.MULTILINE)


def without_noise(text: str) -> str:
    """Return what a descriptor was written, without such lines."""
    return _NAMELESS_LINE.sub("", text) if _NAMELESS in text else text
