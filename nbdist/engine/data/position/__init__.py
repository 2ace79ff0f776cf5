"""Where a loader stands: noted, added up, found again after a fault."""
