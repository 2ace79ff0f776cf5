"""The format of torch's checkpoints, and tensors as bytes."""
