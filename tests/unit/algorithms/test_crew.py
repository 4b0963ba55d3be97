"""Who works with whom, by hand."""

from hypothesis import given
from hypothesis import strategies as st

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
    assert [crew.envs_per_gmi(agent) for agent in (3, 4)] == [8, 2]
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


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.data())
def test_every_environment_has_one_agent_and_agents_have_runs_of_them(envs, data):
    num_agents = data.draw(st.integers(1, len(envs)))
    kinds = data.draw(st.permutations([E] * len(envs) + [AT] * num_agents))
    counts = iter(envs)
    crew = Crew(tuple(kinds), tuple(next(counts) if roles == E else 0 for roles in kinds))
    assert [gmi for agent in crew.agents for gmi in crew.simulators_of(agent)] == list(crew.simulators)
    served = [len(crew.simulators_of(agent)) for agent in crew.agents]
    assert max(served) - min(served) <= 1
    # As a trainer numbers them: from its first on without gaps.
    ends = [crew.first_env_index_of(agent) + crew.envs_per_gmi(agent) for agent in crew.agents]
    assert [crew.first_env_index_of(agent) for agent in crew.agents] == [0, *ends[:-1]]
    assert ends[-1] == sum(envs)
    for simulator in crew.simulators:
        assert simulator in crew.simulators_of(crew.agent_of(simulator))
