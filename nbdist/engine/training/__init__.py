"""Observes training: `hooks` see its calls, `cell` makes records of them; the rest decides."""
