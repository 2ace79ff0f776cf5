"""Libraries beside torch: their names, and what of them is wrapped."""
