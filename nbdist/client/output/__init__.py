"""The text of many ranks in one notebook."""
