"""RLlib Algorithm classes: train, evaluate, save, restore, Tune. They delegate to a Session."""

from __future__ import annotations

import json
import logging
import pickle
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import pyarrow.fs
import ray
import torch
from numpy.typing import NDArray
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.callbacks.utils import make_callback
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.rl_module import RLModule
from ray.rllib.utils import force_list
from ray.rllib.utils.checkpoints import Checkpointable
from ray.tune import Checkpoint, PlacementGroupFactory, Trainable
from ray.tune.result import TRIAL_INFO
from ray.util.placement_group import get_current_placement_group

from placement.errors import PlanError
from placement.inventory import cluster_machine, local_machine
from placement.partitioner import recover_this_host
from placement.plan import PlacementPlan
from placement.types import Machine
from rayagi.algorithms.definition import AlgorithmDefinition
from rayagi.algorithms.registry import DEFINITIONS
from rayagi.config.action_range import warn_of_action_range
from rayagi.config.errors import ConfigError
from rayagi.config.rllib_classes import CONFIGS
from rayagi.config.rllib_config import GmiConfig
from rayagi.config.rules import refuse_unfit_env
from rayagi.config.spec import EVALUATION_SEED_OFFSET, RunSpec
from rayagi.coordinator.auto import resolve_auto
from rayagi.coordinator.cluster import START_TIMEOUT_S, keep_open
from rayagi.coordinator.decoupled import session_of
from rayagi.coordinator.memory_need import reject_insufficient_memory
from rayagi.coordinator.session import Session
from rayagi.envs.errors import EnvError
from rayagi.models.policy import load_policy, new_policy, num_parameters
from rayagi.planning import plan_of
from rayagi.rl_module import export_module, save_modules
from rayagi.rllib_fit import meaning_of_state, refuse_unfit_state
from rayagi.rllib_results import ResultLog, evaluation_results
from rayagi.rllib_run import replaced_checkpoint, write_run
from rayagi.rllib_watch import RunWatch
from rayagi.run.errors import CheckpointError
from rayagi.run.folder import complete_interrupted_save
from rayagi.run.measures import UnstableShare

# Their warnings concern parts of RLlib that rayagi replaces.
for _name in ("ray.rllib.algorithms.algorithm_config", "ray.tune.utils.util"):
    logging.getLogger(_name).setLevel(logging.ERROR)

_logger = logging.getLogger(__name__)
_built: ContextVar[list[GmiAlgorithm]] = ContextVar("built")
"""Those that ``from_checkpoint`` has built, to stop them if they cannot be restored."""


class GmiAlgorithm(Algorithm):
    """An algorithm on GMIs, built by its config's ``build_algo()`` or by ``Tuner(PPO, param_space=config)``.

    ``train()`` returns RLlib's result keys (``env_runners/episode_return_mean``,
    ``num_env_steps_sampled_lifetime``, ``learners/default_policy/...``), and every metric of
    rayagi.monitoring.catalogue under ``rayagi/``.
    """

    config: GmiConfig
    config_class: ClassVar[type[GmiConfig]]

    def __init__(self, config: AlgorithmConfig | Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        # RLlib drops Tune's trial info; its own trial_id is then "default".
        self._trial = config.get(TRIAL_INFO) if isinstance(config, Mapping) else None
        super().__init__(config, **kwargs)

    @classmethod
    def get_default_config(cls) -> GmiConfig:
        """The algorithm's unmodified config."""
        return cls.config_class()

    @classmethod
    def default_resource_request(
        cls, config: AlgorithmConfig | Mapping[str, Any]
    ) -> PlacementGroupFactory | None:
        """Bundles that a Tune trial reserves: its own process first, then one per GMI, in the plan's ``bundle_order``.

        None for invalid settings: Tune then starts the trial on one CPU, which fails with their error, where an error here
        would end all trials.
        """
        machine = _recovered_machine()
        try:
            rayagi_config = cls.get_default_config().update_from_dict(config)
            plan = plan_of(resolve_auto(rayagi_config.to_run_spec(), machine, log=_logger.info), machine)
        except (ConfigError, PlanError, EnvError):
            return None
        cpus = rayagi_config.num_cpus_for_main_process
        # The trial's own process only waits for the GMIs, so by default it reserves no CPU.
        own: dict[str, float] = {"CPU": cpus} if cpus else {}
        bundles = plan.bundles()
        return PlacementGroupFactory(
            [own, *(bundles[index] for index in plan.bundle_order())], strategy=plan.strategy()
        )

    def setup(self, config: AlgorithmConfig) -> None:
        """Start the session. RLlib's own setup is not called: it would start environment runners and learners."""
        self.run_spec = self._resolved(self._as_reserved(self.config.to_run_spec()))
        logging.getLogger("ray.rllib").setLevel(self.config.log_level)
        if self.config.seed is None and self._run_name() is not None:
            _logger.warning(
                "seed is None, which rayagi takes as 0: trials with the same settings are the same run; "
                "give .debugging(seed=tune.randint(0, 2**31)) for different ones"
            )
        self.callbacks = [cls() for cls in force_list(self.config.callbacks_class)]
        self.env_runner_group = self.eval_env_runner_group = self.offline_eval_runner_group = None
        self.env_to_module_connector = self.module_to_env_connector = None
        self.evaluation_config = self.config
        self._set_up_metrics()  # RLlib's step() uses these metrics
        env = self.run_spec.env
        self.unstable = UnstableShare(env.max_unstable_share)
        self.info = env.info()
        refuse_unfit_env(self.run_spec, self.info)
        warn_of_action_range(self.run_spec, self.info, _logger.warning)
        if self.run_spec.data.path is not None:
            # Imported here: it loads readers of datasets.
            from rayagi.algorithms.offline_data import other_task, refuse_unfit_dataset

            refuse_unfit_dataset(self.run_spec.data.path, self.run_spec, self.info)
            if other := other_task(self.run_spec.data.path, self.run_spec.env.id):
                _logger.warning(other)
        session = session_of(
            self.run_spec,
            run_name=self._run_name(),
            on_plan=lambda plan: reject_insufficient_memory(self.run_spec, plan),
        )
        self.session: Session | None = session.__enter__()
        keep_open()  # as RLlib does, whose Algorithm.stop() leaves Ray
        _built.get([]).append(self)
        try:
            self.results = ResultLog(
                self.run_spec,
                self.config.metrics_num_episodes_for_smoothing,
                num_envs=sum(self.plan.envs),
                num_parameters=num_parameters(new_policy(self.run_spec, self.info, torch.device("cpu"))),
            )
            run = self._run_name() or self.run_spec.env.id
            self.watch = RunWatch(self.run_spec, self.session, run=run)
            self._call_back("on_algorithm_init", metrics_logger=self.metrics)
        except BaseException:
            self.cleanup()  # the caller gets no algorithm to stop
            raise

    def _as_reserved(self, spec: RunSpec) -> RunSpec:
        """In a Tune trial, the GMIs that the trial has reserved, if the settings leave their number to the machine.

        A trial keeps its bundles when it is restored, though another machine or cluster would have other GMIs.
        """
        gmi = spec.gmi
        group = get_current_placement_group() if ray.is_initialized() else None
        if group is None or gmi.left_out or (gmi.num_gmis, gmi.gmis_per_gpu, gmi.slices) != (None,) * 3:
            return spec
        own = 1 if self.config.num_cpus_for_main_process else 0
        bundles = group.bundle_specs[own:]
        cpus = {bundle.get("CPU", 0.0) for bundle in bundles}
        if gmi.threads_per_gmi is None and len(cpus) == 1 and not any("GPU" in bundle for bundle in bundles):
            spec = spec.with_gmi(threads_per_gmi=int(min(cpus)) or None)
        return spec.with_gmi(num_gmis=len(bundles) or None)

    @staticmethod
    def _resolved(spec: RunSpec) -> RunSpec:
        """Replace "auto" by measured values. Inside Tune, ``default_resource_request`` has already measured."""
        if spec.gmi.is_resolved:
            return spec
        machine = _recovered_machine()
        in_trial = ray.is_initialized() and get_current_placement_group() is not None
        return resolve_auto(
            spec, machine, log=_logger.info, measuring="missing" if in_trial else "unfinished"
        )

    def _run_name(self) -> str | None:
        """The trial's id, the tag of exported metrics; None outside Tune."""
        return None if self._trial is None else str(self._trial.trial_id)

    @property
    def plan(self) -> PlacementPlan:
        """The session's placement plan."""
        return self._session().plan

    def training_step(self) -> None:
        """One iteration of every GMI. RLlib expects results in ``self.metrics`` and no return value."""
        began, session = time.perf_counter(), self._session()
        with self.metrics.log_time(("timers", "gmi_iteration")):
            if not session.is_pending:  # else Ctrl-C has interrupted the wait for it
                session.submit(1)
            (result,) = session.collect()
        wall_s = time.perf_counter() - began
        self.unstable.add(result.metrics)
        row = self.results.log(self.metrics, result, wall_s)
        self.watch.iterated(result, row, iteration=self.training_iteration + 1, wall_s=wall_s)

    def get_auto_filled_metrics(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """RLlib's, with the config as a dictionary, which is made only once: that asks Ray's server, and may wait for it."""
        filled: dict[str, Any] = Trainable.get_auto_filled_metrics(self, *args, **kwargs)
        if "config" in filled:
            filled["config"] = dict(self._config_dict)
        return filled

    @cached_property
    def _config_dict(self) -> dict[str, Any]:
        return self.config.to_dict()

    def evaluate(self, parallel_train_future: Any = None) -> dict[str, Any]:
        """Whole episodes with the policy's mode, ``evaluation_duration`` of them."""
        session = self._session()
        self._call_back("on_evaluate_start", metrics_logger=self.metrics)
        seed = self.run_spec.seed + EVALUATION_SEED_OFFSET
        began = time.perf_counter()
        result = session.evaluate(self.run_spec.evaluation.num_episodes, seed=seed)
        self.results.evaluated(result, time.perf_counter() - began)
        self.watch.evaluated({"evaluation_return_mean": result.mean_return()})
        results = evaluation_results(result)
        self._call_back("on_evaluate_end", metrics_logger=self.metrics, evaluation_metrics=results)
        return results

    def get_module(self, module_id: str = DEFAULT_MODULE_ID) -> RLModule | None:
        """The current policy as an RLModule on raw observations (rayagi.rl_module)."""
        return self._module(self._session().state_dict()) if module_id == DEFAULT_MODULE_ID else None

    def get_weights(self, policies: Collection[str] | None = None) -> dict[str, dict[str, NDArray[Any]]]:
        """Parameters of the networks by module and name, without statistics of observations and optimizer."""
        if policies is not None and DEFAULT_MODULE_ID not in policies:
            return {}
        model = self._session().state_dict()["shared"]["learner"]["model"]
        return {DEFAULT_MODULE_ID: {name: value.numpy() for name, value in model.items()}}

    def set_weights(self, weights: Mapping[str, Mapping[str, NDArray[Any]]]) -> None:
        """Replace the parameters by those of ``get_weights()``. Statistics and optimizer stay.

        Raises:
            ValueError: other names or shapes.
        """
        state = self._session().state_dict()
        learner = state["shared"]["learner"]
        own, given = learner["model"], weights.get(DEFAULT_MODULE_ID, {})
        shapes = {name: tuple(value.shape) for name, value in own.items()}
        if shapes != {name: tuple(value.shape) for name, value in given.items()}:
            raise ValueError(f"set_weights() takes {DEFAULT_MODULE_ID!r} with the names and shapes {shapes}")
        model = {name: torch.as_tensor(given[name], dtype=value.dtype) for name, value in own.items()}
        shared = {**state["shared"], "learner": {**learner, "model": model}}
        self._session().load_state_dict({**state, "shared": shared})

    def get_state(
        self,
        components: str | Collection[str] | None = None,
        *,
        not_components: str | Collection[str] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Complete state for a resume; the RLModule is saved separately."""
        return {
            "session": self._session().state_dict(),
            "meaning": meaning_of_state(self.run_spec, self.info),
            "metrics_logger": self.metrics.get_state(),
            "episodes": self.results.state_dict(),
            "training_iteration": self.training_iteration,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore ``get_state()``. Warns on other numbers of GMIs or environments, since the batch changes with them.

        Raises:
            ValueError: it is of another algorithm, task, network or normalisation; nothing has changed.
        """
        # States of earlier versions do not say.
        refuse_unfit_state(state.get("meaning", {}), meaning_of_state(self.run_spec, self.info))
        saved, here = state["session"]["num_gmis"], self.plan.num_gmis
        if saved != here:
            _logger.warning(
                "the checkpoint has num_gmis=%d and continues with %d: iterations have %.3g times as many steps, "
                "and environments restart; gmi(num_gmis=%d) keeps both",
                saved,
                here,
                here / saved,
                saved,
            )
        elif sum(before := state["session"].get("envs", self.plan.envs)) != sum(self.plan.envs):
            _logger.warning(
                "the checkpoint has %d environments and continues with %d, which restart",
                sum(before),
                sum(self.plan.envs),
            )
        self._session().load_state_dict(state["session"])
        self.metrics.set_state(state["metrics_logger"])
        self.results.load_state_dict(state["episodes"])
        self._iteration = state["training_iteration"]

    def get_ctor_args_and_kwargs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The config with the number of GMIs in use, so that ``from_checkpoint`` keeps the batch on other machines."""
        config, gmi = self.config, self.config.to_run_spec().gmi
        if not gmi.is_resolved:
            found = self.run_spec.gmi
            config = config.copy(copy_frozen=False).gmi(
                gmis_per_gpu=None, num_envs=found.num_envs, template=found.template, slices=found.slices
            )
        if gmi.wants_search or (gmi.num_gmis is None and gmi.gmis_per_gpu is None):
            planned = self.plan.num_gmis + len(gmi.left_out)
            config = config.copy(copy_frozen=False).gmi(num_gmis=planned)
        return (config.get_state(),), {}

    def get_checkpointable_components(self) -> list[tuple[str, Checkpointable]]:
        """No components: the session has the state, and the saved RLModule is never loaded back."""
        return []

    def save_to_path(
        self,
        path: str | Path | None = None,
        *,
        state: dict[str, Any] | None = None,
        filesystem: pyarrow.fs.FileSystem | None = None,
        use_msgpack: bool = False,
    ) -> str:
        """Write a checkpoint in RLlib's layout; ``Algorithm.from_checkpoint`` restores it.

        An earlier checkpoint there stays until this one is complete. The folder is also a run folder, for the commands of
        ``rayagi``. The policy is also written as an RLModule, under learner_group/learner/rl_module. It needs RLlib alone
        where it is RLlib's default module (rayagi.rl_module).

        Returns:
            The checkpoint's folder.

        Raises:
            DiskError: it cannot be written.
            RunFolderError: the folder has files of the same names that are not of a checkpoint.
        """
        if path is None:
            path = tempfile.mkdtemp(prefix="rayagi_checkpoint_")
        if filesystem is None:
            filesystem, path = pyarrow.fs.FileSystem.from_uri(_absolute(path))
        state = state or self.get_state()
        counters, tables = self.results.counters(), self.results.tables()
        with replaced_checkpoint(str(path), filesystem) as folder:
            super().save_to_path(folder, state=state, use_msgpack=use_msgpack)
            save_modules(self._module(state["session"]), folder / "learner_group" / "learner" / "rl_module")
            write_run(folder, self.run_spec, self.info, self.plan, state["session"], counters, tables)
        return str(path)

    @classmethod
    def from_checkpoint(
        cls, path: str | Path | Checkpoint, filesystem: pyarrow.fs.FileSystem | None = None, **kwargs: Any
    ) -> Algorithm:
        """Build the algorithm of a checkpoint of ``save_to_path``, and restore it. If the save was interrupted while it
        replaced another checkpoint, it is completed first.

        Raises:
            CheckpointError: it is damaged, or of something else.
            DiskError: it has to be completed, and cannot be written.
        """
        given = path if filesystem is not None or isinstance(path, Checkpoint) else _absolute(path)
        _complete(given, filesystem)
        built: list[GmiAlgorithm] = []
        token = _built.set(built)
        try:
            with _named_damage(str(path)):
                return super().from_checkpoint(given, filesystem, **kwargs)
        except BaseException:
            for algorithm in built:  # the caller gets no algorithm to stop
                algorithm.cleanup()
            raise
        finally:
            _built.reset(token)

    def restore_from_path(
        self, path: str | Path, *args: Any, component: str | None = None, **kwargs: Any
    ) -> None:
        """Restore a checkpoint of ``save_to_path``.

        Raises:
            CheckpointError: it is damaged, or of something else.
            ValueError: it is of another algorithm, task, network or normalisation; or a component alone: rayagi's policy
                has observation statistics beside its weights.
        """
        if component is not None:
            raise ValueError(
                f"component={component!r}: rayagi restores whole checkpoints only; leave component out, and give "
                "the checkpoint's top folder"
            )
        given = path if kwargs.get("filesystem") is not None else _absolute(path)
        _complete(given, kwargs.get("filesystem"))
        # Algorithm's own method would also synchronise environment runners, which do not exist here.
        with _named_damage(str(path)):
            Checkpointable.restore_from_path(self, given, *args, **kwargs)

    def restore_env_runners(self, env_runner_group: Any) -> list[int]:
        """There are none to restore."""
        return []

    def cleanup(self) -> None:
        """Stop the GMIs, give back what was reserved, and say how fast it was beside what was predicted."""
        if getattr(self, "session", None) is not None:
            self._session().close()
            self.session = None
            if hasattr(self, "watch") and (summary := self.watch.summary()):
                print(summary)  # noqa: T201 - the run's summary, as on the command line

    def __repr__(self) -> str:
        # Ray also asks an actor whose constructor has just raised.
        if getattr(self, "session", None) is None:
            return f"rayagi.{type(self).__name__}"
        return f"rayagi.{type(self).__name__}(env={self.config.env}; gmis={self.plan.num_gmis})"

    @staticmethod
    def _get_env_id_and_creator(env: Any, config: AlgorithmConfig) -> tuple[str, Any]:
        """Return the id unchanged: RLlib would read an id with a dot as a class. GMIs create the environments."""
        return str(env), None

    def _session(self) -> Session:
        if self.session is None:
            raise RuntimeError(
                "this algorithm was stopped; build another, or restore one with from_checkpoint()"
            )
        return self.session

    def _module(self, state: Mapping[str, Any]) -> RLModule:
        policy = load_policy(state["shared"], self.run_spec, self.info)
        return export_module(policy, self.info, self.run_spec)

    def _call_back(self, name: str, **kwargs: Any) -> None:
        functions = getattr(self.config, f"callbacks_{name}")
        make_callback(name, self.callbacks, functions, kwargs={"algorithm": self, **kwargs})


_MODULE = "the policy is an RLModule on raw observations"
_INSTEAD = {
    "compute_single_action": f"get_module().forward_inference(): {_MODULE}",
    "compute_actions": f"get_module().forward_inference(): {_MODULE}",
    "get_policy": f"get_module(): {_MODULE}",
    "export_model": f"save_to_path(): in its learner_group/learner/rl_module, {_MODULE}",
    "export_policy_model": f"save_to_path(): in its learner_group/learner/rl_module, {_MODULE}",
    "export_policy_checkpoint": "save_to_path(), which saves the policy too",
    **dict.fromkeys(
        ("add_module", "remove_module", "add_policy", "remove_policy"),
        "another algorithm: each has one policy",
    ),
    "evaluate_offline": "evaluate(), which runs episodes",
}
"""Method of RLlib's Algorithm that GmiAlgorithm does not have -> what to use."""


def _refusing(name: str, instead: str) -> Callable[..., NoReturn]:
    def refuse(self: GmiAlgorithm, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{name}() does not exist on GMIs; use {instead}")

    refuse.__name__, refuse.__doc__ = name, f"Not available; use {instead}."
    return refuse


for _name, _instead in _INSTEAD.items():
    setattr(GmiAlgorithm, _name, _refusing(_name, _instead))


def _algorithm_class(definition: AlgorithmDefinition) -> type[GmiAlgorithm]:
    face = definition.rllib
    body = {
        "config_class": CONFIGS[definition.name],
        "__doc__": f"{face.algorithm}, {definition.summary}: ``{face.config}``.",
        "__module__": __name__,
    }
    return type(face.algorithm, (GmiAlgorithm,), body)


ALGORITHMS: dict[str, type[GmiAlgorithm]] = {
    name: _algorithm_class(each) for name, each in DEFINITIONS.items()
}
"""Algorithm class by name in a RunSpec."""
globals().update({each.__name__: each for each in ALGORITHMS.values()})  # pickle and Tune look for them here


def _recovered_machine() -> Machine:
    """Ray's cluster, or this machine before Ray starts, without what killed runs left there."""
    if ray.is_initialized():
        return cluster_machine(START_TIMEOUT_S, recover_this_host)
    recover_this_host()
    return local_machine()


def _complete(path: str | Path | Checkpoint, filesystem: pyarrow.fs.FileSystem | None) -> None:
    """Complete an interrupted save in a folder of this machine."""
    is_local = filesystem is None or isinstance(filesystem, pyarrow.fs.LocalFileSystem)
    if is_local and not isinstance(path, Checkpoint) and "://" not in str(path):
        complete_interrupted_save(Path(path))


@contextmanager
def _named_damage(path: str) -> Iterator[None]:
    """Raise CheckpointError for what reading a damaged checkpoint ends in."""
    try:
        yield
    except (pickle.UnpicklingError, EOFError, KeyError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(path, f"{type(error).__name__}: {error}") from error


def _absolute(path: str | Path) -> str:
    """A path for Arrow, which accepts URIs and absolute local paths.

    Raises:
        ValueError: it is empty.
    """
    text = str(path)
    if not text:
        raise ValueError("the path of a checkpoint is empty")
    return text if "://" in text else str(Path(text).expanduser().absolute())
