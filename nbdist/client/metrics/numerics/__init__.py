"""Where two computations part: two runs, or two layouts of one model. Pure."""
