"""A real browser on real notebooks, shared by this package: pytest needs this file for that."""
