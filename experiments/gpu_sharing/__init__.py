"""MPS shares against plain sharing and a single process, on the same work."""
