"""Benchmark of collectives: measures the cost of compositions, and compares the cost models with it."""
