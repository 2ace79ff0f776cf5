"""Runs that a notebook has made: listed, found and compared."""
