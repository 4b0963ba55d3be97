"""Simulator and agent, and the GMI that hosts them. Plain classes; only groups and rendezvous use Ray."""
