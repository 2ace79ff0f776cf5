"""The connections of gloo: counted, measured, slowed down."""
