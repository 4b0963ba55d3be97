"""Where the time of a reinforcement-learning program goes: RL-Scope (Gleeson et al., MLSys 2021).

Usable without the rest of rayagi, for any Python program.
"""
