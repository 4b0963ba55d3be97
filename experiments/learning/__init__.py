"""Learning curves; see README.md."""
