"""The end of an optimizer's step, where a model's state is whole."""
