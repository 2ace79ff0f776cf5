"""Spreads a model over the ranks.

`parallelize` reads text and policies, `spread` changes the model, one module an axis or policy, and
`layout` is what the user holds. `mesh`, `blocks`, `cuts` and `cost` are pure.
"""
