"""A notebook's cells as a script for torchrun, and the files of a job around it."""
