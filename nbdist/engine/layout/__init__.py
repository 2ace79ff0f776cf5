"""Spreads a model over the ranks.

`parallelize` reads text and policies, `spread` changes the model, and `layout` is what the user
holds. `spec` says what a layout is, `axes` spread a model, `policies` save memory and bandwidth,
`weights` are what a model holds, and `verify` proves a layout against one process.
"""
