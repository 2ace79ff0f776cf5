"""Pictures for files: what a figure is made of, and how it becomes an output. Any thread."""
