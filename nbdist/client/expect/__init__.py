"""What `%dist expect` asks of the newest training, and where it is found not to hold."""
