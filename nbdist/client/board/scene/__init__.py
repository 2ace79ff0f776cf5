"""What a board shows, as plain values: read from a cell's telemetry, kept in a file."""
