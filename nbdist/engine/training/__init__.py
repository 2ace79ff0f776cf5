"""Watches training: `training` holds the hooks, `steps` and `loss` decide what they mean."""
