"""A dry world: one process stands for one rank of many, and tensors have shapes but no numbers."""
