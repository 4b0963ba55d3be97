"""RunSpec: the frozen definition of a run. Actors receive it; it never imports RLlib or Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from collectives.transports.registry import transport_names
from placement.backends import BACKENDS
from rayagi.algorithms.registry import DEFINITIONS
from rayagi.config.learning import LearningSpec, Template

Activation = Literal["elu", "relu", "tanh", "silu"]
Cnn = Literal["nature", "impala"]
Core = Literal["none", "lstm", "gru"]
HeadName = Literal["auto", "gaussian", "squashed_gaussian", "bernoulli"]
if TYPE_CHECKING:
    Backend = str
    TransportName = str
    from actors.protocols import EnvInfo
    from rayagi.envs.registry import RegisteredEnvFactory
else:  # names of registries, which a type checker cannot read
    Backend = Literal["auto", *BACKENDS]
    TransportName = Literal[transport_names()]
Auto = Literal["auto"]
"""What the machine's measurements choose (rayagi.coordinator.auto)."""

EVALUATION_SEED_OFFSET = 1_000_003
"""Added to a run's seed for evaluation episodes: the same start states every time, other than in training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvSpec:
    """Task and engine."""

    id: str = "Ant-v5"
    """Environment id as `rayagi envs` lists it, or any id that gymnasium knows."""
    engine: str = "auto"
    """Simulation engine; `rayagi envs` lists them. auto: the first with a batched version, else Gymnasium's environments."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments for the environment's constructor, as gymnasium.make takes them."""
    max_unstable_share: float = 0.01
    """Largest share of environment steps that may become unstable; a larger one ends the run. An unstable simulation is
    counted and reset."""

    def factory(self) -> RegisteredEnvFactory:
        """Makes its batched environments. Raises as ``rayagi.envs.make_env_factory``."""
        from rayagi.envs.registry import make_env_factory  # imports gymnasium

        return make_env_factory(self.id, engine=self.engine, kwargs=self.kwargs)

    def info(self) -> EnvInfo:
        """Its sizes and limits. Raises as ``rayagi.envs.make_env_factory``."""
        from rayagi.envs.registry import env_info  # imports gymnasium

        return env_info(self.id, self.engine, self.kwargs)


@dataclass(frozen=True, kw_only=True, slots=True)
class GmiSpec:
    """How the machine is partitioned into GMIs."""

    backend: Backend = "auto"
    """auto: mps if GMIs share a GPU to train, direct where mps fails; mig to serve; direct with one GMI per GPU; cpu
    without a GPU."""
    template: Template | Auto = "dp_only"
    """Which roles share a GMI (GMI-DRL §3.1.1, Figure 6). dp_only: simulator, agent and trainer in each. ea_t, e_at, dp_mp:
    separate roles, synchronous. decoupled: simulators with agents, and trainers, asynchronous. offline: a shard of a
    dataset and a trainer in each. program: for workloads without reinforcement learning (rayagi.programs). auto: of
    the algorithm's own, by the throughput model where it is validated."""
    num_learners: int | None = None
    """GMIs of num_gmis that train, in templates with separate trainers. None: 1."""
    num_gmis: int | Auto | None = None
    """All GMIs. None: one per core without a GPU (at most 8), else gmis_per_gpu on every GPU. auto: by search."""
    gmis_per_gpu: int | Auto | None = None
    """GMIs on each GPU; needs a GPU. None: 1; the command line takes a default layout (docs/explanation/search.md). auto:
    the same as num_gmis = auto, so that one file suits every machine."""
    num_envs: int | Auto = 32
    """Environments of one GMI (the papers' num_env). auto: by search, as are unset numbers of GMIs."""
    threads_per_gmi: int | None = None
    """Cores and threads of one GMI. None: the node's cores divided evenly."""
    slices: tuple[float, ...] | Auto | None = None
    """Unequal GMIs: cores of each without a GPU, else its share of a GPU; GPUs and nodes are filled in this order
    if they have room so, else in another. Environments are in proportion to the sizes, num_envs on average. None: equal
    GMIs. auto: unequal ones if the throughput model proposes them and a measurement by turns confirms it."""
    left_out: tuple[int, ...] = ()
    """GMIs of this plan that are not started, by index from 0. Their cores, shares or devices stay unused; the other GMIs
    keep theirs. For dp_only. Replanning sets it."""
    replan: bool = False
    """Whether to change the plan at a checkpoint if a GMI is too slow or memory runs out
    (docs/explanation/coordinator.md)."""
    reserve_timeout_s: float = 10.0
    """How long to wait for Ray to grant the placement group."""
    collective_timeout_s: float = 60.0
    """How long a collective operation waits for the other GMIs, and the driver for a process that answers no pings."""
    hang_timeout_s: float = 600.0
    """How long iterations may take beyond five times the slowest one so far; then the run ends with its last checkpoint, and
    says at which line of code each GMI is. The first iteration, which may compile, and an evaluation have an hour. decoupled
    restarts such a GMI sooner."""
    transport: TransportName = "auto"
    """Transport of gradients. auto: shared memory inside a host if available, TCP across hosts."""
    composition: str = "auto"
    """How GMIs reduce: ip_only, rp_only, hybrid:K, har, device_rp, device_ip, mpr, mrr or preprint
    (docs/explanation/collectives.md). auto: chosen for the layout."""

    @property
    def wants_search(self) -> bool:
        """Whether a search has to choose a number."""
        return "auto" in (self.num_gmis, self.gmis_per_gpu, self.num_envs)

    @property
    def is_resolved(self) -> bool:
        """Whether nothing is "auto"."""
        return not self.wants_search and "auto" not in (self.template, self.slices)

    @property
    def sizes(self) -> tuple[float, ...]:
        """``slices`` as sizes; empty: equal GMIs.

        Raises:
            ValueError: they are "auto".
        """
        if self.slices == "auto":
            raise ValueError('slices = "auto" must be resolved first: rayagi.coordinator.auto.resolve_auto')
        return self.slices or ()

    @property
    def envs(self) -> int:
        """``num_envs`` as a number.

        Raises:
            ValueError: it is "auto".
        """
        if self.num_envs == "auto":
            raise ValueError('num_envs = "auto" must be resolved first: rayagi.coordinator.auto.resolve_auto')
        return self.num_envs


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkSpec:
    """Policy and value networks: multilayer perceptrons, behind a convolutional encoder for each image, with or without a
    recurrent core before the output."""

    hidden: tuple[int, ...] = (256, 128, 64)
    """Hidden layer sizes. Defaults follow GMI-DRL Table 4 for its tasks."""
    activation: Activation = "elu"
    """Activation of the hidden layers."""
    cnn: Cnn = "nature"
    """Encoder of images. nature: Mnih et al. 2015, for 84 x 84 pixels or so. impala: residual, for any size (Espeholt et al.
    2018)."""
    core: Core = "none"
    """lstm or gru: the networks remember what they observed earlier in the episode. They run by torch."""
    core_size: int = 128
    """Units of the recurrent core."""
    shared: bool = False
    """Whether policy and value share encoder, hidden layers and core. They run by torch."""
    critic_only: tuple[str, ...] = ()
    """What only the value network sees: keys of a Dict observation, or ranges of columns as "27:105". They run by torch."""
    module: str | None = None
    """A network of one's own, as file.py:Class or package.module:Class, instead of all of the above
    (docs/explanation/models.md)."""
    module_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further keyword arguments for its constructor."""
    head: HeadName = "auto"
    """Action distribution. auto: gaussian for a box of reals, categorical for choices. squashed_gaussian: tanh of a
    Gaussian, for a bounded box. bernoulli: one logit for each choice of two options, as of a MultiBinary."""
    initial_log_std: float = 0.0
    """Start of the log standard deviation (Gaussian policies)."""
    free_log_std: bool = True
    """Whether a Gaussian policy's log standard deviation is a parameter of its own. False: the network gives it for each
    state, as RLlib's does by default, and runs by torch; a user's module starts where it will. Other policies have none."""

    @property
    def state_dim(self) -> int:
        """Reals of an environment's state: h of a GRU, h and c of an LSTM, of each network. 0 for a user's module."""
        if self.core == "none" or self.module is not None:
            return 0
        return self.core_size * (2 if self.core == "lstm" else 1) * (1 if self.shared else 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationSpec:
    """Evaluation during training, with the policy's mode."""

    interval: int = 0
    """Iterations between evaluations; 0: none during training."""
    num_episodes: int = 10
    """Episodes of one evaluation, spread over the GMIs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSpec:
    """Recorded experience."""

    path: str | None = None
    """Dataset that an offline algorithm learns from, or that the replay of an off-policy one begins with: of `rayagi serve`,
    or of another format that rayagi.replay.loading knows. Every GMI reads it from there."""
    obs_keys: tuple[str, ...] = ()
    """Parts of the dataset's observations that make up the task's, in this order; empty: as the task joins its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpec:
    """All settings of a run.

    Convert with ``rayagi.config.convert``, check with ``rayagi.config.rules.checked``, change with
    ``dataclasses.replace``.
    """

    algorithm: str = "ppo"
    """A name in rayagi.algorithms.registry."""
    env: EnvSpec = field(default_factory=EnvSpec)
    gmi: GmiSpec = field(default_factory=GmiSpec)
    network: NetworkSpec = field(default_factory=NetworkSpec)
    learning: LearningSpec = field(default_factory=LearningSpec)
    """The algorithm's settings; a plain LearningSpec is converted to the algorithm's class. Files and ``--set`` call them
    by its name."""
    evaluation: EvaluationSpec = field(default_factory=EvaluationSpec)
    data: DataSpec = field(default_factory=DataSpec)
    seed: int = 0
    """Seed of all random numbers."""
    total_env_steps: int | None = None
    """Environment steps of all GMIs after which training ends; None: another limit ends it."""

    def __post_init__(self) -> None:
        """Convert a plain LearningSpec to the algorithm's class."""
        if type(self.learning) is LearningSpec and self.algorithm in DEFINITIONS:
            # An algorithm's class may have other defaults.
            given = {each.name: getattr(self.learning, each.name) for each in fields(LearningSpec)}
            usual = LearningSpec()
            common = {name: value for name, value in given.items() if value != getattr(usual, name)}
            object.__setattr__(self, "learning", DEFINITIONS[self.algorithm].settings(**common))

    def with_gmi(self, **changes: Any) -> RunSpec:
        """The run with other fields of ``gmi``."""
        return replace(self, gmi=replace(self.gmi, **changes))
