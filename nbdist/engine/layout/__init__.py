"""Spreads a model over the ranks.

`parallelize` reads text and policies, `spread` changes the model, and `layout` is what the user
holds. `tp`, `cp` and `pp` are axes, `saving` the policies that save, `state` what a model holds and
`proof` the layout against one process. `mesh`, `blocks` and `cost` are pure.
"""
