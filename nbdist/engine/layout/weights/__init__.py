"""Weights and buffers: alike on all ranks, whole by their names, from and into files."""
