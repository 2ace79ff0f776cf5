"""Process groups: torch's private parts of them, and what a group was made with."""
