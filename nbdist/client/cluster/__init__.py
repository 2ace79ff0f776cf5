"""The processes of a cluster and the messages between them."""
