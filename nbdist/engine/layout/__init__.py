"""Spreads a model over the ranks.

`mesh` reads the layout's text (pure), `blocks` finds what a model repeats (pure), one module an
axis changes the model, and `layout` puts them in order and gives the `Layout` handle.
"""
