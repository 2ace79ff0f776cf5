"""A training on disk: found, written, committed, and read into any layout.

`training_state` finds what a training is made of, `folder` knows where it lies and what counts,
`save` and `restore` are what cells call, `saving` writes beside training, `automatic` saves by
itself every so many steps.
"""
