"""Traces on demand: what `--profile` has recorded on the ranks, as one trace and a table.

`chosen` reads which steps; `merge` puts all ranks' traces on one clock, `collectives` adds what the
tap saw; `summary` sums them up and `words` says it; `gather` fetches, writes and hands it on.
"""
