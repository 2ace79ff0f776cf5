"""Sees every collective of a rank.

`tap` puts operators in place, `ops` is their table, `books` counts a group's, `ledger` keeps what
is under way, with `intervals` (pure); `announce` compares before sending (`announce_store` between
hosts).
"""
