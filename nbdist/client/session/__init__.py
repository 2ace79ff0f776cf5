"""The session that users hold, and its work between cells."""
