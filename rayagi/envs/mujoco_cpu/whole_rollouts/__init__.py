"""Whole rollouts in C: policy, physics, rewards and observations of T steps without Python in between."""
