"""Weights and buffers: equal on all ranks, whole by their names, from and into files."""
