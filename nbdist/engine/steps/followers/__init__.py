"""What follows the steps of an optimizer: found, watched, read from the code."""
