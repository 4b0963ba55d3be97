"""Isaac Gym and Isaac Lab, each in a process of its own with the Python that it needs (docs/explanation/simulation.md)."""
