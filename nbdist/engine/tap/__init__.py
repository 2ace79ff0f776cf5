"""Sees every collective of a rank.

`tap` puts operators in place, `ops` is their table, `books` counts a group's, `ledger` keeps what
is under way, a `launch` each; `cuda_times` looks at a GPU's events, `rows` packs what is told;
`stride`, `queue` and `intervals` are pure; `announce` compares before sending
(`announce_messages` the two ends of a message, `announce_store` between hosts).
"""
