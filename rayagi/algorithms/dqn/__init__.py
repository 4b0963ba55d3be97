"""Deep Q-networks (Mnih et al. 2015) with Rainbow's parts as options (Hessel et al. 2018): definition and settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from actors.protocols import EnvInfo
from rayagi.algorithms.definition import AlgorithmDefinition, LearningMetric, RllibFace
from rayagi.algorithms.distributional import support_rules
from rayagi.algorithms.off_policy_face import (
    BATCH_CONVERSION,
    INSTEAD_OF_RLLIBS_REPLAY,
    OFF_POLICY_METRICS,
    OFF_POLICY_NAMES,
    refuse_networks,
)
from rayagi.config.errors import ConfigError
from rayagi.config.learning import at_least_one, positive
from rayagi.config.off_policy import OFF_POLICY_NETWORK, OFF_POLICY_PRESET, OffPolicySpec


@dataclass(frozen=True, kw_only=True, slots=True)
class DQNSpec(OffPolicySpec):
    """Settings of DQN (Mnih et al. 2015). Rainbow is all of its options (Hessel et al. 2018): double, dueling, prioritized,
    noisy, num_atoms = 51 and n_step = 3."""

    capacity: int = 100_000
    """Transitions in the replay, of all trainers together; the oldest are overwritten. At most total_env_steps."""
    learning_starts: int = 1_000
    """Steps of all environments in the replay before the first update. Actions are uniformly random until then."""
    updates_per_step: float = 0.25
    """Gradient steps per environment step, the steps of all environments counted; the paper's: every fourth step."""
    tau: float = 1.0
    """Of a target update: target += tau (network - target). 1, the paper's: a copy."""
    target_interval: int = 250
    """Gradient steps between two target updates (the paper's C)."""
    max_grad_norm: float = 10.0
    """Clip the global gradient norm; 0: no clipping. 10: of the dueling paper."""
    epsilon_start: float = 1.0
    """Share of random actions at the run's first step, from which it falls. Until learning has started it is 1."""
    epsilon_end: float = 0.05
    """Share of random actions after epsilon_steps."""
    epsilon_steps: int = 10_000
    """Steps of all environments, from the run's first, over which the share falls linearly."""
    double: bool = False
    """Double DQN: the network chooses the next action, the target network values it (van Hasselt et al. 2016)."""
    dueling: bool = False
    """Two streams, of the state's value and of the actions' advantages (Wang et al. 2016)."""
    prioritized: bool = False
    """Draw transitions by their last error (Schaul et al. 2016, proportional)."""
    priority_exponent: float = 0.6
    """alpha of prioritized replay: P(i) ~ p_i^alpha. 0: uniform."""
    importance_exponent: float = 0.4
    """beta of prioritized replay: weights (N P(i))^-beta. It rises linearly to 1 at total_env_steps, if that is given."""
    num_atoms: int = 1
    """Atoms of the return's distribution (C51, Bellemare et al. 2017: 51). 1: its mean."""
    v_min: float = -10.0
    """Least return of the distribution."""
    v_max: float = 10.0
    """Largest return of the distribution."""
    noisy: bool = False
    """Explore by learned noise in the layers instead of by epsilon (Fortunato et al. 2018)."""
    sigma0: float = 0.5
    """Initial noise of noisy layers."""

    def broken_rules(self, section: str) -> Iterator[ConfigError]:
        """Rules of every off-policy algorithm, and of the options."""
        yield from OffPolicySpec.broken_rules(self, section)
        for name in ("target_interval", "epsilon_steps", "num_atoms"):
            yield from at_least_one(f"{section}.{name}", getattr(self, name))
        yield from positive(f"{section}.sigma0", self.sigma0)
        for name in ("priority_exponent", "importance_exponent"):
            yield from positive(f"{section}.{name}", getattr(self, name), zero=True)
        for name in ("epsilon_start", "epsilon_end"):
            if not 0 <= getattr(self, name) <= 1:
                yield ConfigError(f"{section}.{name}", getattr(self, name), "must be between 0 and 1")
        if self.importance_exponent > 1:
            yield ConfigError(f"{section}.importance_exponent", self.importance_exponent, "must be at most 1")
        if self.num_atoms > 1:
            yield from support_rules(section, self.v_min, self.v_max)


def refuse_unfit_choices(algorithm: str, info: EnvInfo) -> Iterator[ConfigError]:
    """Refuse environments whose actions are not one choice."""
    if info.action.kind == "continuous":
        reason = f"needs one choice as action, and {info.env_id}'s is a box of {info.action.dim} reals"
        yield ConfigError("algorithm", algorithm, reason, "use algorithm 'sac', 'td3' or 'ppo'")
    elif info.action.kind == "multi_discrete":
        reason = f"needs one choice as action, and {info.env_id}'s are {info.action.dim} at once"
        yield ConfigError("algorithm", algorithm, reason, "use algorithm 'ppo'")


_SMALL_TASKS = {
    **OFF_POLICY_PRESET,
    "rollout_length": 16,
    "batch_size": 64,
    "updates_per_step": 0.5,
    "learning_rate": 1e-3,
    "n_step": 5,
    "double": True,
    "prioritized": True,
    "target_interval": 100,
    "epsilon_steps": 5_000,
    "epsilon_end": 0.04,
}
"""Double DQN with 5-step returns and prioritized replay. After eight trials on CartPole-v1."""

DQN = AlgorithmDefinition(
    name="dqn",
    summary="off-policy, values of discrete actions, with Rainbow's options (Mnih et al. 2015, Hessel et al. 2018)",
    settings=DQNSpec,
    templates=("dp_only", "decoupled"),
    learner="rayagi.algorithms.dqn.learner:DQNLearner",
    model="rayagi.algorithms.dqn.learner:QModel",
    unfit_network=refuse_networks,
    unfit_env=refuse_unfit_choices,
    preset=_SMALL_TASKS,
    preset_network={**OFF_POLICY_NETWORK, "hidden": (128, 128)},
    preset_num_envs=8,
    metrics=(
        *OFF_POLICY_METRICS,
        LearningMetric(name="epsilon", unit="", help="share of random actions"),
    ),
    rllib=RllibFace(
        config="DQNConfig",
        algorithm="DQN",
        base="ray.rllib.algorithms.dqn.dqn:DQNConfig",
        names={
            **OFF_POLICY_NAMES,
            "lr": "learning_rate",
            "double_q": "double",
        },
        converted=BATCH_CONVERSION,
        elsewhere=(
            "train_batch_size",
            "replay_buffer_config",
            "target_network_update_freq",
            "epsilon",
            "hiddens",
        ),
        instead=(
            (r"epsilon", "use training(epsilon_start=, epsilon_end=, epsilon_steps=)"),
            (r"adam_epsilon", "use training(adam_eps=)"),
            (r"target_network_update_freq", "use training(target_interval=), in gradient steps"),
            (r"hiddens", "use rl_module(model_config={'fcnet_hiddens': ...})"),
            (r"td_error_loss_fn", "the loss is Huber's, or the cross entropy of distributions"),
            (r"replay_buffer_config", "use training(capacity=, prioritized=, priority_exponent=)"),
            (r"burn_in_len", "its network has no memory: use PPOConfig with network.core"),
            *INSTEAD_OF_RLLIBS_REPLAY[1:],
        ),
    ),
)
