"""Training over several nodes, which are network namespaces of one host (GMI-DRL, ATC 2025, Table 5)."""
