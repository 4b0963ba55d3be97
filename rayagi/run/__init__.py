"""One run from start to end: its folder, its checkpoints, its limits and the loop that drives the GMIs."""
