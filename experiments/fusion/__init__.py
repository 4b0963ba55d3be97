"""Figures 2, 4, 5, 6, 8 and 9 of "Optimizing Data Collection in Deep Reinforcement Learning" on the machine at hand."""
