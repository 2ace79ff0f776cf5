"""The proof: a layout against one process, step by step."""
