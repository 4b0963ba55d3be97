"""rayagi: reinforcement learning for robots on shared or sliced GPUs, on Ray.

Names are imported when they are first used: ``import rayagi`` loads neither Ray nor torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rayagi.algorithm import A3C, IMPALA, PPO
    from rayagi.config.impala_config import A3CConfig, ImpalaConfig
    from rayagi.config.ppo_config import PPOConfig
    from rayagi.config.spec import RunSpec
    from rayagi.coordinator.session import Session

__version__ = "0.1.0"
__all__ = [
    "A3C",
    "IMPALA",
    "PPO",
    "A3CConfig",
    "ImpalaConfig",
    "PPOConfig",
    "RunSpec",
    "Session",
    "__version__",
]

_HOMES = {
    "A3C": "rayagi.algorithm",
    "A3CConfig": "rayagi.config.impala_config",
    "IMPALA": "rayagi.algorithm",
    "ImpalaConfig": "rayagi.config.impala_config",
    "PPO": "rayagi.algorithm",
    "PPOConfig": "rayagi.config.ppo_config",
    "RunSpec": "rayagi.config.spec",
    "Session": "rayagi.coordinator.session",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rayagi' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
