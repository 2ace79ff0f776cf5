"""The ways to spread a model, an axis each."""
