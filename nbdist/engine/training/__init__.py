"""Watches training: `hooks` look on, `cell` makes records of what they see; the rest decides."""
