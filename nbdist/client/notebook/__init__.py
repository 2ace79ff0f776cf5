"""What is typed in a notebook: the magics, their words, the kernel's one session."""
