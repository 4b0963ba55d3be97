"""RunSpec: everything that defines a run, frozen. Actors receive it; it never imports RLlib or Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from rayagi.algorithms.registry import DEFINITIONS
from rayagi.config.learning import LearningSpec, Template

Activation = Literal["elu", "relu", "tanh", "silu"]
Cnn = Literal["nature", "impala"]
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
            raise ValueError(
                'num_envs = "auto": rayagi.coordinator.auto.resolve_auto makes it a number first'
            )
        return self.num_envs


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkSpec:
    """Separate policy and value networks: multilayer perceptrons, behind a convolutional encoder for each image."""

    hidden: tuple[int, ...] = (256, 128, 64)
    """Hidden layer sizes. Defaults follow GMI-DRL Table 4 for its tasks."""
    activation: Activation = "elu"
    cnn: Cnn = "nature"
    """Encoder of images. nature: Mnih et al. 2015, for 84 x 84 pixels or so. impala: residual, for any size (Espeholt et al.
    2018)."""
    initial_log_std: float = 0.0
    """Start of the state-independent log standard deviation (Gaussian policies)."""


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

    algorithm: str = "ppo"
    """A name in rayagi.algorithms.registry."""
    env: EnvSpec = field(default_factory=EnvSpec)
    gmi: GmiSpec = field(default_factory=GmiSpec)
    network: NetworkSpec = field(default_factory=NetworkSpec)
    learning: LearningSpec = field(default_factory=LearningSpec)
    """The algorithm's settings; a plain LearningSpec becomes one of the algorithm's own class. ``learning_section`` is what
    files and ``--set`` call them."""
    evaluation: EvaluationSpec = field(default_factory=EvaluationSpec)
    seed: int = 0
    total_env_steps: int | None = None
    """Steps of all environments after which training ends; None: another limit ends it."""

    def __post_init__(self) -> None:
        """Settings that every algorithm has become the algorithm's own."""
        if type(self.learning) is LearningSpec and self.algorithm in DEFINITIONS:
            common = {each.name: getattr(self.learning, each.name) for each in fields(LearningSpec)}
            object.__setattr__(self, "learning", DEFINITIONS[self.algorithm].settings(**common))

    @property
    def learning_section(self) -> str:
        """What the algorithm's settings are called in files and ``--set``."""
        return DEFINITIONS[self.algorithm].section
