"""How well the profiler corrects its own overhead."""
