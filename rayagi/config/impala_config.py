"""Former module of ImpalaConfig and A3CConfig, until version 0.1: RLlib checkpoints name it."""

from rayagi.config.rllib_classes import CONFIGS

ImpalaConfig, A3CConfig = CONFIGS["impala"], CONFIGS["a3c"]
