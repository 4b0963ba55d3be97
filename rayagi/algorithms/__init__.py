"""Learning algorithms: pure functions for estimates and losses, networks, the PPO learner, and the program of a GMI."""
