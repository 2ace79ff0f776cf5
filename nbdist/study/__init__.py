"""What a layout would need and give, as pure functions on plain numbers; measuring is elsewhere."""
