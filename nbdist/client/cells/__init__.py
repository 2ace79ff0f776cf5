"""One cell: sent to all ranks, listened to, interrupted, and its outcome."""
