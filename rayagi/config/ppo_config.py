"""Where PPOConfig was until version 0.1: checkpoints of RLlib's name the module."""

from rayagi.config.rllib_classes import CONFIGS

PPOConfig = CONFIGS["ppo"]
