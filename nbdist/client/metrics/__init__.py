"""The numbers that ranks send, and what they mean."""
