"""The `ep` axis: experts of a mixture cut over ranks that have samples of their own."""
