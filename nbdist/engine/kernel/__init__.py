"""What a rank runs in: ipykernel, its streams, its environment."""
