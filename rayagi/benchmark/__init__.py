"""Measures what compositions of collectives cost, and confronts the cost models with it."""
