"""ipykernel and IPython on a rank: requests, cells, their errors."""
