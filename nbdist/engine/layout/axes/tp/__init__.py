"""Tensor parallel: each weight cut over ranks that see the same samples."""
