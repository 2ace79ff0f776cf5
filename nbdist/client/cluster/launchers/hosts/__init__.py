"""Ranks on several hosts: one link a host, whatever launcher has started them."""
