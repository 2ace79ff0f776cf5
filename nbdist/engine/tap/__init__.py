"""Sees every collective of a rank.

`tap` puts operators in place, `ops` is their table, `counters` counts a group's, `in_flight` keeps
what is under way, a `collective` each; `cuda_times` looks at a GPU's events, `encode` packs
sampled rows; `sampling` and `intervals` are pure; `collective_check` compares before
sending, also for which parameters (`purpose`); `message_check` compares the two ends of a message,
`collective_check_store` ranks of several hosts.
"""
