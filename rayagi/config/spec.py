"""RunSpec: everything that defines a run, frozen. Actors receive it; it never imports RLlib or Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Activation = Literal["elu", "relu", "tanh", "silu"]
Algorithm = Literal["ppo", "impala", "a3c"]
Template = Literal["dp_only", "ea_t", "e_at", "dp_mp", "decoupled", "program"]
Backend = Literal["auto", "cpu", "direct", "mps", "mig", "green"]
Auto = Literal["auto"]
"""A number that a search on the machine decides (rayagi.coordinator.auto)."""

EVALUATION_SEED_OFFSET = 1_000_003
"""Added to a run's seed for evaluation episodes: they start alike every time, and unlike the training ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvSpec:
    """Which task, on which engine."""

    id: str = "Ant-v5"
    """Environment id as `rayagi envs` lists it, or any id that gymnasium knows."""
    engine: str = "auto"
    """What runs it, as `rayagi envs` says. auto: the first engine that has it batched, else gymnasium's environments."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments for the environment's constructor, as gymnasium.make takes them."""
    max_unstable_share: float = 0.01
    """Of environment steps. A simulation that becomes unstable is counted and begins a new episode; a larger share ends the
    run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GmiSpec:
    """How the machine is cut."""

    backend: Backend = "auto"
    """auto: mps where GMIs share a GPU to train, mig to serve; direct for a GMI per GPU; cpu without a GPU."""
    template: Template = "dp_only"
    """Which roles share a GMI (GMI-DRL §3.1.1, Figure 6). dp_only: simulator, agent and trainer in each. ea_t, e_at, dp_mp:
    roles apart, in step. decoupled: simulators with agents, and trainers, each at its own pace. program: for workloads of
    other kinds (rayagi.programs), not for training."""
    num_learners: int | None = None
    """GMIs that train, of num_gmis, where the template has trainers apart. None: 1."""
    num_gmis: int | Auto | None = None
    """GMIs in all. None: one per core without a GPU (at most 8), else gmis_per_gpu on every GPU. auto: as searched."""
    gmis_per_gpu: int | Auto | None = None
    """GMIs on each GPU; needs a GPU. None: 1. auto: the same as num_gmis = auto, so that one file suits every machine."""
    num_envs: int | Auto = 32
    """Environments of one GMI (the papers' num_env). auto: as searched, and GMIs too where they are left open."""
    threads_per_gmi: int | None = None
    """Cores and threads of one GMI. None: the node's cores divided evenly."""
    slices: tuple[float, ...] | None = None
    """Unequal GMIs: the cores of each without a GPU, else its share of one; GPUs and nodes are filled in this order. They
    get num_envs environments on average, in proportion to their sizes. None: GMIs are equal."""
    replan: bool = False
    """Whether a GMI that is too slow, or memory that runs out, changes the plan at a checkpoint (docs/coordinator.md)."""
    reserve_timeout_s: float = 10.0
    """How long to wait for Ray to grant the placement group."""
    collective_timeout_s: float = 60.0
    """How long a collective operation waits for the other GMIs."""
    transport: Literal["auto", "shm", "gloo"] = "auto"
    """What gradients travel by. auto: shared memory inside a host where it works, Gloo over TCP across hosts."""
    composition: str = "auto"
    """How GMIs reduce: ip_only, rp_only, hybrid:K, har, mpr or mrr (docs/collectives.md). auto: chosen for the layout."""

    @property
    def wants_search(self) -> bool:
        """Whether a number is left to a search."""
        return "auto" in (self.num_gmis, self.gmis_per_gpu, self.num_envs)

    @property
    def envs(self) -> int:
        """``num_envs`` as a number.

        Raises:
            ValueError: it is still to be searched.
        """
        if self.num_envs == "auto":
            raise ValueError('num_envs = "auto": rayagi.coordinator.auto.resolved makes it a number first')
        return self.num_envs


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkSpec:
    """Separate policy and value networks: multilayer perceptrons."""

    hidden: tuple[int, ...] = (256, 128, 64)
    """Hidden layer sizes. Defaults follow GMI-DRL Table 4 for its tasks."""
    activation: Activation = "elu"
    initial_log_std: float = 0.0
    """Start of the state-independent log standard deviation (Gaussian policies)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LearningSpec:
    """What every algorithm has: a rollout, estimates from it, and minibatches that Adam steps on."""

    rollout_length: int = 32
    """T: steps of every environment between updates."""
    num_epochs: int = 4
    num_minibatches: int = 4
    """Minibatches per epoch; divides rollout_length, since each takes an equal share of every environment's steps."""
    gamma: float = 0.99
    gae_lambda: float = 0.95
    """Decay of the trace: lambda of GAE, and of V-trace (Espeholt et al. 2018, remark 2)."""
    value_coef: float = 0.5
    entropy_coef: float = 0.0
    learning_rate: float = 3e-4
    lr_schedule: Literal["constant", "linear", "kl_adaptive"] = "constant"
    """linear: to zero over total_env_steps. kl_adaptive: divide or multiply by 1.5 to hold target_kl."""
    target_kl: float = 0.01
    """For kl_adaptive: of an update, from the policy before it."""
    max_grad_norm: float = 0.5
    """Clip the global gradient norm; 0: no clipping."""
    adam_eps: float = 1e-5
    normalize_advantages: bool = True
    normalize_obs: bool = True
    normalize_rewards: bool = True
    """Divide rewards by the running standard deviation of the discounted return."""
    obs_clip: float = 10.0
    """Clip normalised observations to [-obs_clip, obs_clip]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PPOSpec(LearningSpec):
    """PPO as the field knows it (Schulman et al. 2017)."""

    clip_ratio: float = 0.2
    value_clip: float | None = None
    """Clip range of the value loss; None: unclipped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImpalaSpec(LearningSpec):
    """The asynchronous algorithms: IMPALA (Espeholt et al. 2018), and A3C (Mnih et al. 2016) without its correction."""

    rho_bar: float = 1.0
    """Upper bound of the importance ratios in the temporal differences: which policy the values converge to. IMPALA's."""
    c_bar: float = 1.0
    """Upper bound of those in the trace: how fast they do. IMPALA's."""
    clip_ratio: float | None = 0.2
    """Bound on what one update changes, as in PPO (IMPALA with it is known as APPO); None: the papers' plain gradient."""
    max_lag: int = 1
    """Updates that the policy which collected a rollout may be behind. 0: the synchronous learner. 1: a rollout is collected
    while the one before is learned from; more only evens out their paces, and learns more slowly."""
    on_stale: Literal["wait", "drop", "correct"] = "wait"
    """wait: no rollout begins that could be older than max_lag. drop: older ones are not learned from. correct: all are,
    whatever their age (IMPALA's)."""
    rollouts_per_update: int | None = None
    """Rollouts that one update takes, each of one collecting GMI. None: one of every such GMI, as ``wait`` always has it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationSpec:
    """Evaluation during training, with the policy's mode."""

    interval: int = 0
    """Iterations between evaluations; 0: none during training."""
    num_episodes: int = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpec:
    """A whole run.

    Convert with ``rayagi.config.convert``, check with ``rayagi.config.rules.checked``, change with
    ``dataclasses.replace``.
    """

    algorithm: Algorithm = "ppo"
    """a3c and impala are asynchronous where the template is decoupled."""
    env: EnvSpec = field(default_factory=EnvSpec)
    gmi: GmiSpec = field(default_factory=GmiSpec)
    network: NetworkSpec = field(default_factory=NetworkSpec)
    ppo: PPOSpec = field(default_factory=PPOSpec)
    impala: ImpalaSpec = field(default_factory=ImpalaSpec)
    """Of both asynchronous algorithms."""
    evaluation: EvaluationSpec = field(default_factory=EvaluationSpec)
    seed: int = 0
    total_env_steps: int | None = None
    """Steps of all environments after which training ends; None: another limit ends it."""

    @property
    def learning_section(self) -> Literal["ppo", "impala"]:
        """Name of the section that the algorithm reads."""
        return "ppo" if self.algorithm == "ppo" else "impala"

    @property
    def learning(self) -> PPOSpec | ImpalaSpec:
        """That section."""
        return self.ppo if self.algorithm == "ppo" else self.impala
