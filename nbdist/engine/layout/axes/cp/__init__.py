"""Context parallel: each rank works on a part of the sequences, attention on all of them."""
