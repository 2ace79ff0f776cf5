"""What ranks do together after a fault."""
