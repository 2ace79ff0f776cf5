"""Numbers as people read them: bytes by powers of ten, and counted things."""


def name_bytes(size: float) -> str:
    """Return bytes with their unit: `4 B`, `4.0 kB`, `32 kB`, `8.4 MB`."""
    if size < 1000:
        return f"{size:.0f} B"
    units = iter(("kB", "MB", "GB", "TB"))
    while size >= 999.5 and (unit := next(units, None)):
        size, last = size / 1000, unit
    return f"{size:.1f} {last}" if size < 9.95 else f"{size:,.0f} {last}"


def counted(number: int, word: str) -> str:
    """Return a number of things: `1 step`, `1,240 steps`."""
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"
