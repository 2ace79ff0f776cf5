"""One cell: sent to all ranks, listened to, interrupted, and what came of it."""
