"""Pipelines: each rank has some of the blocks, and micro-batches go through all."""
