"""The notebook's interface: the magics, their arguments, the kernel's one session."""
