"""Former module of PPOConfig, until version 0.1: RLlib checkpoints name it."""

from rayagi.config.rllib_classes import CONFIGS

PPOConfig = CONFIGS["ppo"]
