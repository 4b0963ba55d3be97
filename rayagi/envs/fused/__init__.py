"""Simulators written in a small dialect, of which fused kernels are made: see docs/simulation.md."""

from rayagi.envs.fused.simulator import Box, Discrete, Simulator

Choices = Discrete
"""The name of Discrete before."""

__all__ = ["Box", "Choices", "Discrete", "Simulator"]
