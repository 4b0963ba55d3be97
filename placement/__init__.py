"""What fits where: machines, slices, plans, and their reservation in Ray. No reinforcement learning in it."""
