"""Stand-in of Isaac Lab 2.x."""
