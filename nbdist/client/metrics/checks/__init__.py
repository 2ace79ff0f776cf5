"""Notice that a training goes wrong, by what its ranks tell (`nbdist/engine/checks`), and say so.

`cell_checks` hears one cell's records and gives lines for people. Each rule is in a module of
`rules/`, behind the interface of `rule`.
"""
