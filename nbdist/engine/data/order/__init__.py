"""Which samples each rank gets, and in which order."""
