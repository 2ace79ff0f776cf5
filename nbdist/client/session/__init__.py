"""What users hold: the session and what it does beside a cell."""
