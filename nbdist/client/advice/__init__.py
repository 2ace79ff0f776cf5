"""Before a cluster is paid for: what a layout would need."""
