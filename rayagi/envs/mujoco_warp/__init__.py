"""Worlds of tasks on MuJoCo Warp: thousands on a GPU slice; on a CPU for correctness."""
