"""Spreads a model over the ranks.

`parallelize` reads text and policies, `spread` changes the model, and `layout` is what the user
holds. `plan` describes a layout, `axes` spread a model, `policies` save memory and bandwidth,
`weights` handle parameters and buffers, and `verify` proves a layout against one process.
"""
