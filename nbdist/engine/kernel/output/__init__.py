"""The text of a rank: descriptors, streams, what of them is sent."""
