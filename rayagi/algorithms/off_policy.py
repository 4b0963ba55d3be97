"""Base of the learners that learn from experience replay.

One update, in order (``learn``):

1. Insert the rollout's transitions into this trainer's replay; before the first ones, those of a dataset, if there is one.
2. Once ``learning_starts`` steps of all environments are in, make ``updates_per_step`` gradient steps for each step that was
   inserted. Each takes a share of ``batch_size`` from every trainer's replay, and reduces the gradients over trainers.
3. Merge the observation statistics of this rollout, for the next one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.protocols import EnvInfo, StateDict
from actors.replay import (
    Gatherer,
    ReplayCheckpointer,
    ReplayError,
    ReplayMeter,
    ReplayStore,
    Selection,
    saved_schema,
    select,
)
from actors.replay.selection import Selector
from actors.rollout import Rollout
from collectives.communicator import Communicator
from rayagi.algorithms.gradient_updater import refuse_nonfinite, timed_collective
from rayagi.algorithms.parameter_group import ParameterGroups
from rayagi.algorithms.rollout_learner import MergedLearner
from rayagi.algorithms.transitions import (
    ACTION,
    DISCOUNT,
    REWARD,
    TransitionAssembler,
    TransitionLayout,
    TransitionRows,
    Transitions,
)
from rayagi.config.errors import ConfigError
from rayagi.config.off_policy import OffPolicySpec
from rayagi.device_replay import DeviceGatherer
from rayagi.models.exploring_heads import BoxHead
from rayagi.models.networks import Model
from rayagi.native.denormals import flushed_denormals

if TYPE_CHECKING:  # it loads readers of datasets, which runs without one do not need
    from rayagi.algorithms.offline_data import RecordedTransitions

OffPolicySpecT = TypeVar("OffPolicySpecT", bound=OffPolicySpec)


class OffPolicyUpdater(ParameterGroups, ABC, Generic[OffPolicySpecT]):
    """Networks, target networks and optimisers of one algorithm: one gradient step on a batch."""

    spec: OffPolicySpecT
    measured: ClassVar[tuple[str, ...]]
    """Metrics of a step, named in the catalogue."""

    def __init__(
        self, model: Model, spec: OffPolicySpecT, communicator: Communicator, info: EnvInfo, *, weight: float
    ) -> None:
        """Collective. ``weight``: samples of this trainer in a batch over the mean of all trainers."""
        super().__init__(model, spec, communicator)
        self.info, self.weight = info, weight
        self.device = next(model.parameters()).device
        self.generator = torch.Generator(self.device)
        """Of the random numbers of a step. Seeded before each rollout's steps."""

    @abstractmethod
    def step(self, batch: Transitions) -> Tensor:
        """One gradient step. Returns the metrics of ``measured``, without a synchronisation with the device."""

    def begin(self, *, seed: int, learning_rate_factor: float) -> None:
        """Begin the steps of a rollout.

        Args:
            seed: of the steps' random numbers
            learning_rate_factor: the learning rates are this part of those in the settings
        """
        self.begin_update()
        self.generator.manual_seed(seed)
        for group in self.groups.values():
            group.set_learning_rate(learning_rate_factor)


class OffPolicyLearner(MergedLearner[OffPolicySpecT]):
    """Learns from a replay; subclasses add the step (``updater_class``).

    Each trainer has a replay of its own, and draws from it in proportion to its environments. So with uniform draws all
    transitions have the same chance, and several trainers are one learner of the merged batch. On a GPU slice the networks
    are on the GPU, replays are in host memory, and batches reach the device in the fastest way (``DeviceGatherer``).
    """

    updater_class: ClassVar[type[OffPolicyUpdater[Any]]]
    """What makes the gradient steps."""

    def __init__(self, *, recorded: RecordedTransitions | None = None, **whose: Any) -> None:
        """Collective; arguments as for MergedLearner.

        Args:
            recorded: a dataset that an empty replay begins with
            whose: as for MergedLearner

        Raises:
            ConfigError: the replay does not fit into memory, or a batch has fewer transitions than there are trainers.
        """
        super().__init__(**whose)
        self._recorded = recorded
        self._env_counts = self.communicator.all_gather(torch.tensor([self.num_envs])).flatten().tolist()
        """Environments of each trainer."""
        self._share, weight = self._share_of_batch()
        self.layout = self._make_layout()
        self.selector: Selector = self.layout.selector
        """How transitions are drawn."""
        self.replay = self._make_replay()
        self._meter, self._new_transitions = ReplayMeter(self.replay), 0
        self._checkpointer = ReplayCheckpointer(self.replay)
        self._assembler = TransitionAssembler(self.layout, self.spec.gamma, self.spec.n_step)
        self._gatherer = self._make_gatherer()
        self.inserted = 0
        """Steps of all environments that were put into the replays, those before a restored state included."""
        self._restored_notes: tuple[str, ...] = ()
        """Notes of the next update."""
        self._owed = 0.0
        """Gradient steps that the steps so far allow and that have not been made: less than one between rollouts."""
        self.filled = 0
        """``inserted`` of the trainer that has the fewest: all of them begin to learn with the same rollout."""
        self.updater: OffPolicyUpdater[OffPolicySpecT] = self.updater_class(
            self.policy.model, self.spec, self.communicator, self.policy.info, weight=weight
        )
        self._set_warm_up()

    def _share_of_batch(self) -> tuple[int, float]:
        """Transitions that this trainer adds to a batch, and that number over the mean of all trainers."""
        counts, size = self._env_counts, self.spec.batch_size
        before, whole = sum(counts[: self.communicator.rank]), sum(counts)
        share = size * (before + self.num_envs) // whole - size * before // whole
        if size * min(counts) < whole:
            raise ConfigError(
                "batch_size",
                size,
                f"leaves a trainer without transitions: {len(counts)} trainers draw in proportion to their environments, "
                f"{', '.join(map(str, counts))}",
                f"use at least {-(-whole // min(counts))}",
            )
        return share, share * self.communicator.world_size / size

    def _make_layout(self) -> TransitionLayout:
        """That of all trainers, since each takes its part of a dataset's rows."""
        found = TransitionLayout.of(self.policy.info, self.spec)
        if self._recorded is not None:
            found = replace(found, frames=1)  # whoever recorded it may have left steps out
        capacity = self._part(self.spec.capacity, min(self._env_counts))
        if self._recorded is not None and self._recorded_rows(1) > capacity:
            reason = f"is less than the dataset's {self._recorded.num_steps:,} steps need"
            raise ConfigError("capacity", self.spec.capacity, reason, "use a larger capacity")
        # Rows of a dataset's short episodes may need more than that. Then each transition is one.
        fits = self._recorded_rows(found.steps) <= -(-capacity // found.steps)
        return found if fits else TransitionLayout(self.policy.info, 1, 1)

    def _recorded_rows(self, steps: int) -> int:
        """This trainer's part of a dataset's rows of so many transitions; 0 without a dataset."""
        rows = 0 if self._recorded is None else self._recorded.num_rows(steps)
        return -(-rows // self.communicator.world_size)

    def _selectors(self) -> tuple[Selector, ...]:
        """Those that the replay is made for."""
        return (self.layout.selector,)

    def _make_replay(self) -> ReplayStore:
        steps, most = self.layout.steps, self._own(self.spec.capacity)
        if self.total_env_steps is not None:
            # No more than the whole run fills. Ends of episodes of a row's steps or more at most double the rows.
            new = self._own(self.total_env_steps) * (1 if steps == 1 else 2)
            whole = steps * self._recorded_rows(steps) + new
            most = min(most, max(whole, self._own(self.spec.learning_starts)))
        rows, schema = -(-most // steps), self.layout.schema
        try:
            return ReplayStore.create(schema, rows, selectors=self._selectors(), seed=self.seed)
        except ReplayError as error:
            raise ConfigError(
                "capacity",
                self.spec.capacity,
                f"is too much for this host's memory: {error}",
                "use a smaller capacity",
            ) from error

    def _own(self, of_all: int) -> int:
        """This trainer's part of a number of steps of all environments."""
        return self._part(of_all, self.num_envs)

    def _part(self, of_all: int, num_envs: int) -> int:
        """That of a trainer of so many environments, at least 1."""
        return max(1, -(-of_all * num_envs // self.total_envs))

    def _make_gatherer(self) -> Gatherer | DeviceGatherer:
        device, subscriptions = self.policy.device, self.layout.subscriptions
        if device.type == "cuda":
            return DeviceGatherer(self.replay, subscriptions, self._share, device)
        return Gatherer(self.replay, subscriptions, self._share, out=self.layout.batch(self._share))

    @property
    def warms_up(self) -> bool:
        """Whether the replay still has too few transitions to learn from."""
        return self.filled < self.spec.learning_starts

    def _set_warm_up(self) -> None:
        """Act uniformly at random while nothing has been learned."""
        head = self.policy.model.head
        assert isinstance(head, BoxHead)
        head.explore_uniformly(self.warms_up and self.updater.steps == 0)

    def learn(self, rollout: Rollout) -> dict[str, float]:
        """Insert the next rollout, then make the gradient steps that it allows.

        Raises:
            NonFiniteError: a loss or gradient became NaN or infinite; the parameters must not be saved.
        """
        self.sync_s, self.notes, self._restored_notes = 0.0, self._restored_notes, ()
        learning_rate = self.spec.learning_rate * self._learning_rate_factor()
        with flushed_denormals():
            # 1. Insert.
            if self._recorded is not None and not len(self.replay):
                self._insert_recorded(self._recorded)
            self._insert(rollout)
            steps = rollout.num_steps * self.total_envs
            self.inserted += steps
            self.filled = self._least_inserted()
            # 2. Gradient steps.
            rows = [] if self.warms_up or not self.filled else self._steps_for(steps)
            self.sync_s += self.updater.sync_s if rows else 0.0
            self.env_steps += steps
            self._set_warm_up()
            # 3. Statistics.
            self._merge_observed(rollout)
        metrics = self._metrics(rows, learning_rate)
        self.iteration += 1
        return {"sync_s": self.sync_s, **metrics}

    def _least_inserted(self) -> int:
        """Of all trainers; 0 without a row, while returns of n steps wait for their ends.

        One that replaces a lost one has an empty replay, and all or none reduce gradients.
        """
        own = self.inserted if len(self.replay) else 0
        if self.communicator.world_size == 1:
            return own
        with timed_collective(self, "all_gather"):
            found = self.communicator.all_gather(torch.tensor([own]))
        return int(found.min())

    def _insert(self, rollout: Rollout) -> None:
        self._insert_rows(self._assembler.rows(rollout))

    def _insert_rows(self, rows: TransitionRows) -> None:
        # More rows than the replay holds would need rows of their own batch to be overwritten.
        kept = slice(-self.replay.capacity, None)
        columns = {name: column[kept].numpy() for name, column in rows.columns.items()}
        self._put(columns, rows.lengths[kept].numpy())
        self._new_transitions += int(rows.lengths[kept].sum())

    def _put(self, columns: Mapping[str, NDArray[Any]], lengths: NDArray[np.int64]) -> None:
        """Insert rows into the replay."""
        self.replay.insert(columns, lengths)

    def _insert_recorded(self, recorded: RecordedTransitions) -> None:
        """Insert this trainer's part of a dataset. Its observations are the first ones of the running statistics, unless
        there are some already.

        Raises:
            DatasetError: it has values that are not finite or of other units, or is damaged.
        """
        found, spec = recorded.scan(), self.spec
        self.notes = found.notes
        rank, world_size = self.communicator.rank, self.communicator.world_size
        head = self.policy.model.head
        for rows in recorded.rows(head, self.layout, spec.gamma, spec.n_step, part=rank, parts=world_size):
            self._insert_rows(rows)
        self.inserted += recorded.num_steps
        normaliser = self.policy.normaliser
        if normaliser is not None and normaliser.moments.count == 0:
            normaliser.update(found.observations)

    def _steps_for(self, env_steps: int) -> list[Tensor]:
        """The gradient steps that these environment steps allow, with random numbers of this iteration and trainer."""
        self._owed += self.spec.updates_per_step * env_steps
        count = int(self._owed)
        self._owed -= count
        words = np.random.SeedSequence([self.seed, self.communicator.rank, self.iteration]).generate_state(2)
        self.updater.begin(seed=int(words[0]), learning_rate_factor=self._learning_rate_factor())
        return [self._step(int(words[1]), draw) for draw in range(count)]

    def _step(self, seed: int, draw: int) -> Tensor:
        selection = select(self.replay, self.selector, self._share, seed=seed, draw=draw)
        measured = self.updater.step(self.batch(selection))
        self.updater.steps += 1
        return measured

    def batch(self, selection: Selection) -> Transitions:
        """These transitions with observations normalised by the current statistics. Valid until the next call."""
        values = self._gatherer(selection).values
        obs, next_obs = map(self.policy.observe, self.layout.observations(values))
        return Transitions(obs, next_obs, *(values[name] for name in (ACTION, REWARD, DISCOUNT)))

    def _held(self) -> float:
        """Transitions that can be drawn."""
        if self.layout.steps == 1:
            return len(self.replay)
        return self.replay.total(self.replay.tree(self.layout.selector.spec))

    def _metrics(self, rows: list[Tensor], learning_rate: float) -> dict[str, float]:
        """Means over the gradient steps, their learning rate, and metrics of this replay."""
        replay = {
            **self._meter.values(),
            "replay_transitions": self._held(),
            "replay_new_transitions": float(self._new_transitions),
            "gradient_steps": float(len(rows)),
        }
        self._new_transitions = 0
        self.histograms = self._meter.histograms
        if not rows:
            return replay
        names = self.updater.measured
        metrics = dict(zip(names, torch.stack(rows).mean(0).tolist(), strict=True))
        refuse_nonfinite(metrics, self.iteration + 1, "gradient steps")
        return {**metrics, "learning_rate": learning_rate, **replay}

    def shared_state(self) -> StateDict:
        """Updater state, environment steps, observation statistics, and the fraction of a gradient step that is left."""
        return {"learner": self.updater.state_dict(), "owed": self._owed, **super().shared_state()}

    def local_state(self) -> StateDict:
        """Steps that were put into the replay, and those that wait for it."""
        return {"inserted": self.inserted, "waiting": self._assembler.waiting()}

    def save_replay(self, folder: Path) -> bool:
        """Write the replay. Blocks that the run's last checkpoint has already are linked, not written."""
        self._checkpointer.write(folder)
        return True

    def load_state(self, shared: Mapping[str, Any], local: Mapping[str, Any] | None) -> None:
        """Restore a saved state.

        Without the replay that was saved with it, learning goes on once ``learning_starts`` new steps are in.
        """
        super().load_state(shared, local)
        self.updater.load_state_dict(shared["learner"])
        self._owed, self.inserted, self.filled = float(shared["owed"]), 0, 0
        self._assembler.forget()
        replay = None if local is None else local.get("replay")
        if replay is not None and saved_schema(replay) != self.replay.schema:
            # Of an earlier version, or of rollouts of another length.
            self._restored_notes = ("The saved replay has rows of another form: it begins anew",)
        elif local is not None and replay is not None:
            self._checkpointer.read(replay)
            self.inserted = self.filled = int(local["inserted"])
            self._assembler.load(local.get("waiting", ()))
        self._set_warm_up()
