"""Notice that a training goes wrong, by what its ranks tell (`nbdist/engine/checks`), and say so.

`checks` hears one cell's records and gives lines for people; each rule is a module of its own and
decides on plain values.
"""
