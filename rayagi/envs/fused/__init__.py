"""Fused simulators: scalar functions in a small dialect of Python, compiled to kernels.

docs/how-to/fused-simulators.md shows how to write one.
"""

from rayagi.envs.fused.simulator import Box, Discrete, Simulator

__all__ = ["Box", "Discrete", "Simulator"]
