"""Where ImpalaConfig and A3CConfig were until version 0.1: checkpoints of RLlib's name the module."""

from rayagi.config.rllib_classes import CONFIGS

ImpalaConfig, A3CConfig = CONFIGS["impala"], CONFIGS["a3c"]
