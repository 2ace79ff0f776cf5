"""Small processes that serve one machine: the warmed parent, the controller, the store."""
