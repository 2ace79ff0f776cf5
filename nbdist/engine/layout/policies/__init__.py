"""Policies that save: memory, bytes on the wire, time."""
