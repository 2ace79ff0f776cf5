"""Plain values that every process knows, on the standard library alone; `payload` has tensors."""
