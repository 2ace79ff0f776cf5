"""Processes of one user: how they end, meet and are found."""
