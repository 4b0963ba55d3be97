"""The loop over actors: opens a run's GMIs, asks them for iterations, merges what they answer.

Nothing is imported here: a plan for this machine needs parts of it, and does not load Ray.
"""
