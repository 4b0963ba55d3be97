"""Fused simulators that ship with rayagi."""
