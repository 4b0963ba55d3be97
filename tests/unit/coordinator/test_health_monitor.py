"""The health monitor over fake sessions: what it logs, and how it replans and recovers."""

from dataclasses import replace

import pytest

from actors.protocols import IterationResult
from placement.backends.base import SliceHealth
from placement.errors import PartitionError, SliceLostError
from placement.types import Gpu, Machine, Node
from rayagi.algorithms.ppo import PPOSpec
from rayagi.cli.settings import with_num_gmis
from rayagi.config.spec import GmiSpec, NetworkSpec, RunSpec
from rayagi.coordinator.decisions import QUIET_WINDOWS
from rayagi.coordinator.health_monitor import SHARE_CHECK_INTERVAL_S, RunHealthMonitor, fewer_envs
from rayagi.planning import plan_of
from rayagi.run.limits import Position

GIB = 2**30
MACHINE = Machine(nodes=(Node(name="a", cores=(0, 1, 2, 3), memory_total_bytes=4 * GIB),), origin="test")
HERE = Position(
    iteration=7, env_steps=700, train_s=1.0, evaluation_return=None, training_return=None, training_episodes=0
)


class Session:
    """Keeps what it is given."""

    def __init__(self, spec, machine=MACHINE):
        self.plan, self.collected = plan_of(spec, machine), ()
        self.closed, self.loaded, self.shares = False, None, []

    def answer(self, *own_s, memory=GIB // 2):
        """One iteration: each GMI's seconds of work; all last as long as the slowest."""
        self.collected = tuple(
            (
                IterationResult(
                    iteration=1,
                    metrics={
                        "env_steps": 100.0,
                        "iteration_s": max(own_s),
                        "sync_s": max(own_s) - own,
                        "resident_bytes": float(memory),
                    },
                ),
            )
            for own in own_s
        )

    def health(self):
        return self.shares

    def close(self):
        self.closed = True

    def load_state_dict(self, state):
        self.loaded = state


def health_monitor(spec, machine=MACHINE, **other):
    session, messages, kept = Session(spec, machine), [], []
    made = RunHealthMonitor(
        spec,
        session,
        reopen=lambda own: Session(own, machine),
        log=messages.append,
        save_spec=kept.append,
        window=3,
        **other,
    )
    return made, session, messages, kept


def spec(**gmi):
    return RunSpec(gmi=GmiSpec(**({"num_gmis": 4, "num_envs": 8} | gmi)))


def test_a_slow_gmi_is_reported_once_and_left_to_the_user():
    watch, session, messages, _ = health_monitor(spec())
    for _ in range(6):
        session.answer(1.0, 3.0, 1.0, 1.0)
        watch.check_health(HERE)
    assert len(messages) == 1
    # 100 steps in 3 s of its own work; the others wait in sync_s. 3 x 100 = 300 against 4 x 33.
    assert messages[0].startswith("Iteration 7: GMI 1 runs at 33 steps/s of its own work, the others at 100;")
    assert messages[0].endswith(" To continue without GMI 1 cpu[1], start with --replan, or resume with it.")
    assert not watch.replan_pending


def test_a_gmi_that_is_slow_now_and_then_is_reported_once_until_it_was_normal_for_long():
    watch, session, messages, _ = health_monitor(spec())

    def iterations(count, own_s):
        for _ in range(count):
            session.answer(1.0, own_s, 1.0, 1.0)
            watch.check_health(HERE)

    for _ in range(5):
        iterations(6, 3.0)
        iterations(6, 1.0)
    assert len(messages) == 1
    iterations(QUIET_WINDOWS * 3, 1.0)  # windows of three iterations
    iterations(6, 3.0)
    assert len(messages) == 2


def test_the_cause_is_named_with_the_slow_gmi():
    watch, session, messages, _ = health_monitor(spec(num_gmis=2))
    for _ in range(3):
        session.answer(1.0, 3.0)
        for (result,), simulate_s, queue_s in zip(session.collected, (0.6, 2.5), (0.0, 1.5), strict=True):
            result.metrics.update(simulate_s=simulate_s, act_s=0.1, update_s=0.2, queue_s=queue_s)
        watch.check_health(HERE)
    # 1.5 s of 3 s without a core
    cause = "(100% of the difference is in simulate, 1.9e+03 ms more an iteration; 50% of its time others were on its cores)"
    assert f"GMI 1 runs at 33 steps/s of its own work, the others at 100 {cause}" in messages[0]


def test_gmis_without_a_simulator_are_not_compared_but_their_memory_is_watched():
    watch, session, messages, _ = health_monitor(spec(template="e_at", num_gmis=3))
    metrics = [
        {"env_steps": 100.0, "iteration_s": 4.0, "exchange_s": 3.0, "resident_bytes": 1e8},
        {"env_steps": 100.0, "iteration_s": 4.0, "exchange_s": 2.0, "resident_bytes": 1e8},
        {"iteration_s": 4.0, "exchange_s": 3.9, "update_s": 0.1, "resident_bytes": 1.25 * GIB},
    ]
    for _ in range(3):
        session.collected = tuple((IterationResult(iteration=1, metrics=each),) for each in metrics)
        watch.check_health(HERE)
    (line,) = messages
    assert "GMI 1 runs at 50 steps/s of its own work, the others at 100" in line
    assert "GMI 2 holds 1,280 MiB of 1,365" in line  # a third of the node's 4 GiB
    assert line.endswith("Half as many environments need less: 4 for each GMI.")


def test_replanning_carries_the_shared_state_and_says_what_changes():
    watch, session, messages, kept = health_monitor(spec(replan=True))
    for _ in range(3):
        assert not watch.replan_pending
        session.answer(1.0, 3.0, 1.0, 1.0)
        watch.check_health(HERE)
    assert watch.replan_pending
    assert "At the next checkpoint the run continues without GMI 1 cpu[1]." in messages[0]
    watch.on_checkpoint()
    assert kept == []  # that checkpoint is of the old plan
    new = watch.replan({"shared": {"weights": 1}, "local": [1, 2, 3, 4], "num_gmis": 4})
    assert session.closed
    assert new.plan.num_gmis == 3
    assert new.loaded == {"shared": {"weights": 1}, "num_gmis": 4}
    assert (
        "3 GMIs and 24 environments in total instead of 32: the batch is 0.75 times as large" in messages[1]
    )
    assert not watch.replan_pending
    watch.on_checkpoint()
    watch.on_checkpoint()
    assert [own.gmi.left_out for own in kept] == [(1,)]
    # The new session is judged by itself, from the beginning.
    new.answer(1.0, 1.0, 3.0)
    watch.check_health(HERE)
    assert len(messages) == 2


def test_a_plan_with_fewer_environments_keeps_to_the_run_s_rules():
    """Four minibatches of whole rollouts are of four environments at least; of single steps they need two samples."""
    learning = PPOSpec(rollout_length=8, num_minibatches=4)
    whole = replace(spec(num_envs=12), network=NetworkSpec(core="lstm"), learning=learning)
    assert learning.envs_per_shuffle == 4
    assert fewer_envs(whole, 4) == 4  # not 6
    assert fewer_envs(replace(whole, gmi=replace(whole.gmi, num_envs=4)), 4) == 0
    assert fewer_envs(replace(whole, network=NetworkSpec()), 4) == 6
    # In proportion to 3 and 1, 2 x 8 environments are 12 and 4, and 2 x 4 are 6 and 2.
    unequal = replace(whole, gmi=GmiSpec(num_envs=16, slices=(3, 1)))
    assert fewer_envs(unequal, 2) == 8
    assert fewer_envs(replace(unequal, gmi=GmiSpec(num_envs=8, slices=(3, 1))), 2) == 0
    single = PPOSpec(rollout_length=2, num_minibatches=2)
    assert fewer_envs(replace(spec(num_envs=2), learning=single), 4) == 0
    assert fewer_envs(replace(spec(num_envs=5), learning=single), 4) == 2


def test_memory_near_the_even_share_halves_the_environments():
    watch, session, messages, _ = health_monitor(spec(replan=True))
    for _ in range(3):
        session.answer(1.0, 1.0, 1.0, 1.0, memory=0.95 * GIB)  # of 4 GiB, each has 1
        watch.check_health(HERE)
    assert "GMI 0 holds 973 MiB of 1,024" in messages[0]
    assert "At the next checkpoint the run continues with 4 environments in each GMI." in messages[0]
    new = watch.replan({"shared": {}, "num_gmis": 4})
    assert (new.plan.num_gmis, new.plan.num_envs) == (4, 4)
    assert "local" not in new.loaded  # of other environments


def test_shares_are_asked_after_now_and_then_and_their_memory_makes_a_new_plan():
    now = [0.0]
    watch, session, messages, _ = health_monitor(spec(replan=True), clock=lambda: now[0])
    # Its process holds 1000 MiB of 1024 by the driver; the program counts 512.
    shares = [
        SliceHealth(state="ok", text="the daemon answers", memory_bytes=1000 * 2**20 if i == 2 else GIB // 2)
        for i in range(4)
    ]
    session.shares = shares
    for _ in range(3):
        session.answer(1.0, 1.0, 1.0, 1.0)
        watch.check_health(HERE)
    assert messages == []
    now[0] = SHARE_CHECK_INTERVAL_S
    watch.check_health(HERE)
    assert "GMI 2 holds 1,000 MiB of 1,024" in messages[0]
    new = watch.replan({"shared": {}, "num_gmis": 4})
    assert (new.plan.num_gmis, new.plan.num_envs) == (4, 4)


def test_several_slow_gmis_are_left_out_together():
    watch, session, messages, _ = health_monitor(spec(replan=True))
    for _ in range(3):
        session.answer(1.0, 9.0, 8.0, 1.0)
        watch.check_health(HERE)
    assert "GMI 1 runs at 11 steps/s" in messages[0]
    assert "GMI 2 runs at 12 steps/s" in messages[0]
    assert (
        "without GMI 1 and GMI 2 the run is faster, 200 steps/s of own work with 2 instead of 44 with 4"
        in (messages[0])
    )
    assert [gmi_slice.cores for gmi_slice in watch.replan({"shared": {}, "num_gmis": 4}).plan.slices] == [
        (0,),
        (3,),
    ]


def test_a_run_below_its_prediction_is_reported():
    watch, session, messages, _ = health_monitor(spec(replan=True), planned_steps_per_s=250.0)
    for _ in range(3):
        session.answer(1.0, 1.0, 1.0, 1.0)
        watch.check_health(HERE)
    assert "GMIs run at 100 steps/s of their own work, 250 were predicted" in messages[0]
    assert not watch.replan_pending


def test_a_gmi_below_its_prediction_is_reported_though_the_others_are_near_it():
    watch, session, messages, _ = health_monitor(spec(), planned_steps_per_s=100.0)
    for _ in range(3):
        session.answer(1 / 0.9, 1 / 0.9, 1 / 0.75, 1 / 0.9)  # 100 steps each
        watch.check_health(HERE)
    (line,) = messages
    assert "GMI 2 runs at 75 steps/s of its own work, 100 were predicted" in line


def test_unequal_gmis_that_take_as_long_are_alike():
    watch, session, messages, _ = health_monitor(spec(num_gmis=None, slices=(3.0, 1.0)))
    for _ in range(3):
        session.answer(1.0, 1.0)
        for results, steps in zip(session.collected, (150.0, 50.0), strict=True):
            results[0].metrics["env_steps"] = steps
        watch.check_health(HERE)
    assert messages == []


def node(name, num_cores, num_gpus=0):
    gpus = tuple(
        Gpu(index=i, uuid=f"GPU-{name}{i}", name="A100", memory_total_bytes=GIB) for i in range(num_gpus)
    )
    return Node(name=name, cores=tuple(range(num_cores)), memory_total_bytes=4 * GIB, gpus=gpus)


def machine(*nodes):
    return Machine(nodes=nodes, origin="test")


PLACES = {
    "cores": (MACHINE, {"num_gmis": 4}),
    "unequal cores": (machine(node("a", 6)), {"slices": (1.0, 2.0, 1.0, 2.0)}),
    "cores of two nodes": (machine(node("a", 3), node("b", 2)), {"num_gmis": 4}),
    "shares of a GPU": (
        machine(node("a", 4, 1)),
        {"slices": (0.4, 0.2, 0.2, 0.2), "backend": "direct"},
    ),
    "equal shares of two GPUs": (machine(node("a", 8, 2)), {"gmis_per_gpu": 2, "backend": "direct"}),
    "GPUs of two nodes": (machine(node("a", 4, 2), node("b", 4, 2)), {"gmis_per_gpu": 1}),
}


@pytest.mark.parametrize("straggler", range(4))
@pytest.mark.parametrize("place", PLACES)
def test_a_straggler_gives_up_its_own_place_and_the_others_keep_theirs(place, straggler):
    where, gmi = PLACES[place]
    given = RunSpec(gmi=GmiSpec(**({"num_envs": 10, "replan": True} | gmi)))
    watch, session, messages, kept = health_monitor(given, where)
    before = session.plan
    for _ in range(3):
        session.answer(*(9.0 if index == straggler else 1.0 for index in range(4)))
        watch.check_health(HERE)
    after = watch.replan({"shared": {}, "num_gmis": 4}).plan
    others = [index for index in range(4) if index != straggler]
    assert after.slices == tuple(before.slices[index] for index in others)
    assert after.envs == tuple(before.envs[index] for index in others)
    assert after.left_out == (before.slices[straggler],)
    label = before.slices[straggler].label()
    assert f"the run continues without GMI {straggler} {label}." in messages[0]
    assert f"without {straggler} ({label})" in after.reason
    # What is saved gives the same plan when the run is resumed.
    watch.on_checkpoint()
    assert plan_of(kept[0], where) == after


def test_a_run_of_the_default_number_of_gmis_is_resumed_without_those_left_out():
    given = RunSpec(gmi=GmiSpec(num_envs=8, left_out=(1,)))
    plan = plan_of(given, MACHINE)  # one GMI per core, without the second
    assert plan.num_gmis == 3
    assert plan_of(with_num_gmis(given, plan.num_gmis), MACHINE).slices == plan.slices


def test_the_next_straggler_is_counted_among_those_that_run():
    watch, session, _, kept = health_monitor(spec(replan=True))
    cores = [gmi_slice.cores for gmi_slice in session.plan.slices]
    # First GMI 1 of 0, 1, 2, 3; then GMI 2 of 0, 2, 3, which is 3.
    for straggler in (1, 2):
        for _ in range(3):
            session.answer(*(9.0 if index == straggler else 1.0 for index in range(session.plan.num_gmis)))
            watch.check_health(HERE)
        session = watch.replan({"shared": {}, "num_gmis": session.plan.num_gmis})
        watch.on_checkpoint()
    assert [own.gmi.left_out for own in kept] == [(1,), (1, 3)]
    assert [gmi_slice.cores for gmi_slice in session.plan.slices] == [cores[0], cores[2]]


LOST = SliceLostError(("GMI 1 mps[GPU-1 x0.50]",), "the MPS daemon is gone")


def test_a_lost_share_is_recovered_from_three_times_until_a_checkpoint_was_written():
    watch, _, messages, _ = health_monitor(spec())
    state = {"shared": {"weights": 1}, "local": [1, 2, 3, 4], "num_gmis": 4}
    assert watch.recover(LOST, None).loaded is None
    assert watch.recover(LOST, state).loaded == state
    watch.on_checkpoint()
    for _ in range(3):
        watch.recover(LOST, state)
    with pytest.raises(SliceLostError, match=r"GMI 1 mps\[GPU-1 x0.50\] was lost") as caught:
        watch.recover(LOST, state)
    assert "Recovered 3 times" in caught.value.__notes__[-1]
    assert "the MPS daemon is gone. All GMIs are restarted on repartitioned GPUs" in messages[0]
    assert "from the beginning, since there is no checkpoint yet (attempt 1 of 3)" in messages[0]
    assert "from the last checkpoint (attempt 3 of 3)" in messages[-1]


def test_a_checkpoint_of_the_plan_before_is_recovered_without_its_environments():
    watch, session, _, _ = health_monitor(spec(replan=True))
    state = {"shared": {"weights": 1}, "local": [1, 2, 3, 4], "num_gmis": 4}
    for _ in range(3):
        session.answer(1.0, 1.0, 1.0, 1.0, memory=0.95 * GIB)
        watch.check_health(HERE)
    watch.on_checkpoint()
    watch.replan(state)  # as many GMIs with half the environments: local states would not fit them
    assert watch.recover(LOST, state).loaded == {"shared": {"weights": 1}, "num_gmis": 4}


def test_a_failed_repartition_is_the_error_and_names_the_lost_share():
    watch, _, _, _ = health_monitor(spec())

    def refuse(own):
        raise PartitionError("the MPS daemon", "did not come up", "See the log")

    watch._reopen = refuse
    with pytest.raises(PartitionError) as caught:
        watch.recover(LOST, None)
    assert "while the run recovered from: GMI 1 mps" in caught.value.__notes__[-1]
