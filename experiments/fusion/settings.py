"""What all pipelines train with: the same task, networks and sizes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """PPO on CartPole with two networks of two hidden layers of 64."""

    num_envs: int = 1024
    rollout_length: int = 32
    num_epochs: int = 4
    num_minibatches: int = 4
    hidden: tuple[int, ...] = (64, 64)
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip_ratio: float = 0.2
    value_coef: float = 0.5
    entropy_coef: float = 0.0
    learning_rate: float = 1e-3
    adam_eps: float = 1e-5
    max_grad_norm: float = 0.5
    seed: int = 0
