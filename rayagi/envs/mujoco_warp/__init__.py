"""Engine mujoco_warp: tasks on MuJoCo Warp, thousands of worlds on a GPU slice; on a CPU for tests."""
