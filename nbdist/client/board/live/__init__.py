"""The live board: the kernel sends points and words, the page draws them."""
