"""A program's roles in a profile: which operations an iteration consists of, and what they are nested in."""

from rayagi import profiler
from rayagi.profiler.trace import Category, read_profile
from tests.unit.algorithms.test_program import SPEC, build, run_members


def scopes(folder):
    """By thread: pairs of an operation and what it is directly in, without repetitions, in order of appearance."""
    (process,) = read_profile(folder).processes
    found = []
    for thread in process.threads:
        pairs, open_ = {}, []
        for event in thread.events:
            if event["category"] in (Category.ITERATION, Category.OPERATION):
                name, depth = process.name_of(int(event["name"])), int(event["depth"])
                open_ = [*open_[:depth], name]
                pairs[open_[-2] if depth else None, name] = None
        found.append(list(pairs))
    return found


def test_an_iteration_of_the_synchronous_program_is_collecting_and_learning(tmp_path):
    with profiler.profile(tmp_path / "p"):
        build().iterate()
    assert scopes(tmp_path / "p") == [
        [
            (None, "iteration"),
            ("iteration", "collect"),
            ("collect", "act"),
            ("collect", "simulate"),
            ("iteration", "learn"),
        ]
    ]
    (process,) = read_profile(tmp_path / "p").processes
    assert process.name == "GMI 0: simulator, agent, trainer"
    events = process.threads[0].events
    names = [process.name_of(int(name)) for name in events["name"]]
    assert names.count("act") == names.count("simulate") == SPEC.learning.rollout_length


def recorded_s(process, name):
    """Seconds of all operations of a name."""
    events = [event for thread in process.threads for event in thread.events]
    own = [each for each in events if process.name_of(int(each["name"])) == name]
    return (
        sum(int(each["end"] - each["start"]) for each in own if each["category"] == Category.OPERATION) / 1e9
    )


def test_phases_of_metrics_are_the_profile_s_operations(tmp_path):
    with profiler.profile(tmp_path / "p"):
        metrics = build().iterate().metrics
    (process,) = read_profile(tmp_path / "p").processes
    # A clock is read within the recorded operation, never around it.
    for phase, name in (("simulate_s", "simulate"), ("act_s", "act"), ("update_s", "learn")):
        assert 0 < metrics[phase] <= recorded_s(process, name)


def test_reductions_are_operations_and_communication(tmp_path):
    with profiler.profile(tmp_path / "p"):
        run_members(2, lambda communicator: build(SPEC, communicator).iterate())
    (process,) = read_profile(tmp_path / "p").processes
    members = [pairs for pairs in scopes(tmp_path / "p") if ("learn", "reduce") in pairs]
    assert len(members) == 2
    communication = [
        process.name_of(int(event["name"]))
        for thread in process.threads
        for event in thread.events
        if event["category"] == Category.COMMUNICATION
    ]
    updates = SPEC.learning.num_epochs * SPEC.learning.num_minibatches
    assert communication.count("all_reduce") == 2 * updates
