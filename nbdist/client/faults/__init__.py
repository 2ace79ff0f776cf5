"""What goes wrong in a cell: found, told, and recovered from."""
