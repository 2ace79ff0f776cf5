"""Leave the notebook: its cells as a script for torchrun, and the job files around it."""
