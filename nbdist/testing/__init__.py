"""`pytest --nbdist`: notebooks as tests, each in a kernel of its own."""
