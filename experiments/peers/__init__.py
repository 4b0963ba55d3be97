"""PPO by other libraries with one set of settings, each in a virtual environment of its own; see README.md."""

TASKS = ("Humanoid-v5", "HumanoidStandup-v5", "HalfCheetah-v5", "Hopper-v5", "Ant-v5", "Walker2d-v5")
