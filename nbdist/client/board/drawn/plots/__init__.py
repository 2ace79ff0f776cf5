"""The plots of the board's views, each drawn upon axes of its own. They load matplotlib."""
