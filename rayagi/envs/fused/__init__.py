"""Simulators written in a small dialect, of which fused kernels are made: see docs/simulation.md."""

from rayagi.envs.fused.simulator import Box, Choices, Simulator

__all__ = ["Box", "Choices", "Simulator"]
