"""Gives a replacement rank what a living rank holds.

`clone` does it, from whom `sources` (pure) decides; `pickler` and `unpickler` carry the namespace
with one memo, `recipes` and `torch_rebuild` what torch ties to a process, `p2p` the bytes;
`fingerprint` finds names that differ between ranks.
"""
