"""Figures 2, 4, 5, 6, 8 and 9 of "Optimizing Data Collection in Deep Reinforcement Learning" on the machine at hand."""

import os

# Before torch is imported: its threads would spin while they wait, and on a busy machine keep the others from working.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
