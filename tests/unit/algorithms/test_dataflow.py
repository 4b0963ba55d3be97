"""Dataflow topology: every collector has one learner, given by its producer number."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.gmi import GmiIdentity
from placement.role_layout import make_role_layout
from placement.types import Slice
from rayagi.algorithms.appo import AppoSpec
from rayagi.algorithms.dataflow import DataflowTopology
from rayagi.algorithms.ppo import PPOSpec
from rayagi.config.spec import GmiSpec, RunSpec


def flow_of(template, collectors, learners, num_envs=4, **appo):
    layout = make_role_layout(template, num_learners=learners)
    worker_types = tuple(layout.assign_roles(collectors + learners))
    identity = GmiIdentity(
        index=0, num_gmis=len(worker_types), slice=Slice(node="n", backend="cpu"), roles=worker_types[0],
        task="t", worker_types=worker_types,
    )  # fmt: skip
    spec = RunSpec(
        algorithm="ppo" if template == "ea_t" else "appo",
        learning=PPOSpec() if template == "ea_t" else AppoSpec(**appo),
        gmi=GmiSpec(template=template, num_envs=num_envs),
    )
    return DataflowTopology.for_gmi(spec, identity)


counts = st.integers(1, 9).flatmap(lambda most: st.tuples(st.just(most), st.integers(1, most)))


@given(counts)
def test_in_lockstep_every_collector_sends_to_the_learner_that_its_number_names(numbers):
    collectors, learners = numbers
    dataflow = flow_of("ea_t", collectors, learners)
    producers = [dataflow.producer_of(collector) for collector in range(collectors)]
    assert len(set(producers)) == collectors
    for collector, producer in enumerate(producers):
        assert producer % learners == dataflow.learner_of(collector)
        assert collector in dataflow.served_simulators(dataflow.learner_of(collector))
    assert dataflow.total_rows == sum(dataflow.envs)


@given(counts, st.integers(1, 9))
def test_without_lockstep_learners_share_what_an_update_takes(numbers, rollouts):
    collectors, learners = numbers
    dataflow = flow_of(
        "decoupled", collectors, learners, num_envs=16, on_stale="drop", rollouts_per_update=rollouts
    )
    assert dataflow.total_rows == 16 * rollouts
    rows = [dataflow.rows(learner) for learner in range(learners)]
    assert max(rows) - min(rows) <= 1


@pytest.mark.parametrize(
    ("template", "appo", "lockstep", "free_running", "slots", "max_lag"),
    [
        ("ea_t", {}, True, False, 1, 0),
        ("decoupled", {"max_lag": 0}, True, True, 1, 0),
        ("decoupled", {"max_lag": 0, "on_stale": "drop"}, True, True, 1, 0),
        ("decoupled", {}, False, True, 2, 2),
        ("decoupled", {"max_lag": 1}, False, True, 2, 1),
        ("decoupled", {"max_lag": 8, "on_stale": "wait"}, True, True, 9, 8),
        ("decoupled", {"max_lag": 8, "on_stale": "drop"}, False, True, 8, 8),
        ("decoupled", {"max_lag": 2, "on_stale": "correct"}, False, True, 2, None),
        # Two collectors: 3 updates of one rollout are 1 slot of each, 3 of 4 rollouts are 6.
        ("decoupled", {"max_lag": 3, "rollouts_per_update": 1}, False, True, 1, 3),
        ("decoupled", {"max_lag": 3, "rollouts_per_update": 4}, False, True, 6, 3),
        ("decoupled", {"max_lag": 1, "rollouts_per_update": 1}, False, True, 1, 1),
    ],
)
def test_a_bound_on_lag_is_slots_in_lockstep_and_a_limit_otherwise(
    template, appo, lockstep, free_running, slots, max_lag
):
    dataflow = flow_of(template, 2, 1, **appo)
    assert (dataflow.lockstep, dataflow.free_running, dataflow.slots, dataflow.max_lag) == (
        lockstep,
        free_running,
        slots,
        max_lag,
    )
