"""The process group: formed, re-created, scaled."""
