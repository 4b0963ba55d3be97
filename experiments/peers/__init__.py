"""PPO by other libraries with one set of settings, each in a virtual environment of its own; see README.md."""

PIXELS = "Pong-v5"
"""Of EnvPool's Atari: four frames of 84 x 84 bytes, six actions."""
DISCRETE = ("CartPole-v1", PIXELS)
TASKS = ("Humanoid-v5", "HumanoidStandup-v5", "HalfCheetah-v5", "Hopper-v5", "Ant-v5", "Walker2d-v5")
