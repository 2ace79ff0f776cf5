"""What runs once per rank."""
