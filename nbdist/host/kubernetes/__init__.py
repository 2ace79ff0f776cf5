"""Pods of Kubernetes: started, watched, and commands run in them."""
