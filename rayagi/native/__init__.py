"""Programs in C, compiled where they run: what their parts have in common."""
