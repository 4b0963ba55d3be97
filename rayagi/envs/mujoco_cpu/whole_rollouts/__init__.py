"""Rollouts of MuJoCo's worlds in a compiled program: policy, physics and formulas without Python between the steps."""
