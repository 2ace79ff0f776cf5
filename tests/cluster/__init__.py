"""Whole sessions on one shared cluster, which ends with this package: pytest needs this file."""
