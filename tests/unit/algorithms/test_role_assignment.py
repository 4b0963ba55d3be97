"""Role assignments checked by hand."""

from hypothesis import given
from hypothesis import strategies as st

from rayagi.algorithms.role_assignment import RoleAssignment

E, A, T, AT, EAT = (
    ("simulator",),
    ("agent",),
    ("trainer",),
    ("agent", "trainer"),
    ("simulator", "agent", "trainer"),
)


def test_agents_serve_even_contiguous_ranges_of_simulators():
    assignment = RoleAssignment((E, E, E, AT, AT), (4, 4, 2, 0, 0))
    assert (assignment.simulators, assignment.agents) == ((0, 1, 2), (3, 4))
    assert assignment.simulators_of(3) == (0, 1)
    assert assignment.simulators_of(4) == (2,)
    assert [assignment.agent_of(simulator) for simulator in assignment.simulators] == [3, 3, 4]
    assert [assignment.first_env_index(simulator) for simulator in assignment.simulators] == [0, 4, 8]
    assert [assignment.envs_per_gmi(agent) for agent in (3, 4)] == [8, 2]
    assert [assignment.first_env_index_of(agent) for agent in (3, 4)] == [0, 8]
    assert assignment.names(assignment.simulators_of(4)) == {2: "GMI 2 (simulator)"}


def test_pairs_are_neighbours():
    assignment = RoleAssignment((E, A, E, A), (4, 0, 4, 0))
    assert [assignment.simulators_of(agent) for agent in assignment.agents] == [(0,), (2,)]
    assert [assignment.agent_of(simulator) for simulator in assignment.simulators] == [1, 3]
    assert assignment.first_env_index(2) == 4


def test_three_kinds():
    assignment = RoleAssignment((E, E, A, T), (4, 4, 0, 0))
    assert assignment.agents == (2,)
    assert assignment.simulators_of(2) == (0, 1)


def test_an_agent_beside_its_simulator_acts_for_it():
    assignment = RoleAssignment((EAT, EAT), (4, 4))
    assert [assignment.simulators_of(agent) for agent in assignment.agents] == [(0,), (1,)]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.data())
def test_every_environment_has_one_agent_and_agents_have_runs_of_them(envs, data):
    num_agents = data.draw(st.integers(1, len(envs)))
    worker_types = data.draw(st.permutations([E] * len(envs) + [AT] * num_agents))
    counts = iter(envs)
    assignment = RoleAssignment(
        tuple(worker_types), tuple(next(counts) if roles == E else 0 for roles in worker_types)
    )
    assert [gmi for agent in assignment.agents for gmi in assignment.simulators_of(agent)] == list(
        assignment.simulators
    )
    served = [len(assignment.simulators_of(agent)) for agent in assignment.agents]
    assert max(served) - min(served) <= 1
    # As a trainer numbers them: from its first on without gaps.
    ends = [
        assignment.first_env_index_of(agent) + assignment.envs_per_gmi(agent) for agent in assignment.agents
    ]
    assert [assignment.first_env_index_of(agent) for agent in assignment.agents] == [0, *ends[:-1]]
    assert ends[-1] == sum(envs)
    for simulator in assignment.simulators:
        assert simulator in assignment.simulators_of(assignment.agent_of(simulator))
