"""Samples of a source, read in the order that the sampler gives."""
