"""What a layout is: its mesh, blocks, inputs and cost, before a model is spread."""
