"""The description of a layout: its mesh, blocks, inputs and cost, before a model is spread."""
