"""Who works with whom, by hand."""

from rayagi.algorithms.partners import Partners

E, A, T, AT, EAT = (
    ("simulator",),
    ("agent",),
    ("trainer",),
    ("agent", "trainer"),
    ("simulator", "agent", "trainer"),
)


def test_simulators_are_shared_out_in_even_runs():
    partners = Partners((E, E, E, AT, AT), (4, 4, 2, 0, 0))
    assert (partners.simulators, partners.agents) == ((0, 1, 2), (3, 4))
    assert partners.simulators_of(3) == (0, 1)
    assert partners.simulators_of(4) == (2,)
    assert [partners.agent_of(simulator) for simulator in partners.simulators] == [3, 3, 4]
    assert [partners.first_env_index(simulator) for simulator in partners.simulators] == [0, 4, 8]
    assert [partners.envs_of(agent) for agent in (3, 4)] == [8, 2]
    assert [partners.first_env_index_of(agent) for agent in (3, 4)] == [0, 8]
    assert partners.names(partners.simulators_of(4)) == {2: "GMI 2 (simulator)"}


def test_pairs_are_neighbours():
    partners = Partners((E, A, E, A), (4, 0, 4, 0))
    assert [partners.simulators_of(agent) for agent in partners.agents] == [(0,), (2,)]
    assert [partners.agent_of(simulator) for simulator in partners.simulators] == [1, 3]
    assert partners.first_env_index(2) == 4


def test_three_kinds():
    partners = Partners((E, E, A, T), (4, 4, 0, 0))
    assert partners.agents == (2,)
    assert partners.simulators_of(2) == (0, 1)


def test_an_agent_beside_its_simulator_acts_for_it():
    partners = Partners((EAT, EAT), (4, 4))
    assert [partners.simulators_of(agent) for agent in partners.agents] == [(0,), (1,)]
