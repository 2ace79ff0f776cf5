"""Text out of a model as it is spread: `Layout.generate`."""
