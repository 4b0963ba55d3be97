"""Collective communication between GMIs: gradients, statistics, experience. Independent of Ray and RL."""
