"""Registry of the algorithms. To add one, write its package and list its definition here."""

from __future__ import annotations

from rayagi.algorithms.a3c import A3C
from rayagi.algorithms.appo import APPO
from rayagi.algorithms.bc import BC
from rayagi.algorithms.definition import AlgorithmDefinition
from rayagi.algorithms.dqn import DQN
from rayagi.algorithms.fast_sac import FAST_SAC
from rayagi.algorithms.fast_td3 import FAST_TD3
from rayagi.algorithms.impala import IMPALA
from rayagi.algorithms.iql import IQL
from rayagi.algorithms.ppo import PPO
from rayagi.algorithms.sac import SAC
from rayagi.algorithms.td3 import TD3
from rayagi.algorithms.td3_bc import TD3_BC
from rayagi.algorithms.trpo import TRPO

DEFINITIONS: dict[str, AlgorithmDefinition] = {
    definition.name: definition
    for definition in (PPO, TRPO, APPO, IMPALA, A3C, SAC, TD3, DQN, FAST_TD3, FAST_SAC, BC, IQL, TD3_BC)
}
"""Definitions by name; the first is the default."""
