"""Puts a rank together, and answers what the notebook asks of it."""
