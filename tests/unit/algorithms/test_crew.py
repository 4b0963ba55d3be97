"""Who works with whom, by hand."""

from rayagi.algorithms.crew import Crew

E, A, T, AT, EAT = (
    ("simulator",),
    ("agent",),
    ("trainer",),
    ("agent", "trainer"),
    ("simulator", "agent", "trainer"),
)


def test_simulators_are_shared_out_in_even_runs():
    crew = Crew((E, E, E, AT, AT), (4, 4, 2, 0, 0))
    assert (crew.simulators, crew.agents) == ((0, 1, 2), (3, 4))
    assert crew.simulators_of(3) == (0, 1)
    assert crew.simulators_of(4) == (2,)
    assert [crew.agent_of(simulator) for simulator in crew.simulators] == [3, 3, 4]
    assert [crew.first_env_index(simulator) for simulator in crew.simulators] == [0, 4, 8]
    assert [crew.envs_of(agent) for agent in (3, 4)] == [8, 2]
    assert [crew.first_env_index_of(agent) for agent in (3, 4)] == [0, 8]
    assert crew.names(crew.simulators_of(4)) == {2: "GMI 2 (simulator)"}


def test_pairs_are_neighbours():
    crew = Crew((E, A, E, A), (4, 0, 4, 0))
    assert [crew.simulators_of(agent) for agent in crew.agents] == [(0,), (2,)]
    assert [crew.agent_of(simulator) for simulator in crew.simulators] == [1, 3]
    assert crew.first_env_index(2) == 4


def test_three_kinds():
    crew = Crew((E, E, A, T), (4, 4, 0, 0))
    assert crew.agents == (2,)
    assert crew.simulators_of(2) == (0, 1)


def test_an_agent_beside_its_simulator_acts_for_it():
    crew = Crew((EAT, EAT), (4, 4))
    assert [crew.simulators_of(agent) for agent in crew.agents] == [(0,), (1,)]
