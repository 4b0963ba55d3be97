"""The serving program of dp_only in this process: its records equal the environments' steps."""

from dataclasses import replace

import pytest
import torch

from actors.gmi import GmiContext, GmiIdentity
from actors.protocols import ActionSpec
from actors.roles import Agent
from collectives.solo import SoloCommunicator
from placement.types import Slice
from rayagi.algorithms.normalisers import ObservationNormaliser
from rayagi.config.spec import EnvSpec, GmiSpec, NetworkSpec, RunSpec
from rayagi.envs import env_info, make_env_factory
from rayagi.models.networks import ActorCritic
from rayagi.models.policy import load_policy, new_policy
from rayagi.serving.column_layout import ColumnLayout
from rayagi.serving.dataset import open_dataset
from rayagi.serving.manifest import DatasetFolder, Description
from rayagi.serving.program import Recording, ServingJob, merged_results
from rayagi.serving.simulating import ServingAgent
from rayagi.serving.templates import DpOnlyServing

TASK = "InvertedPendulum-v5"


def recording_in(path):
    return Recording(
        folder=str(path),
        format="parquet",
        session=0,
        first_episode=0,
        rows_per_file=10**6,
        bytes_per_file=10**9,
    )


def job(path=None, *, greedy, num_envs=4, core="none"):
    spec = RunSpec(
        env=EnvSpec(id=TASK),
        gmi=GmiSpec(num_envs=num_envs, backend="cpu"),
        network=NetworkSpec(hidden=(8,), core=core, core_size=6),
    )
    info = env_info(TASK)
    normaliser = ObservationNormaliser(info.obs_dim, 10.0, torch.device("cpu"))
    shared = {
        "learner": {"model": ActorCritic(info, spec.network, seed=1).state_dict()},
        "obs_normaliser": normaliser.state_dict(),
    }
    recording = None
    if path is not None:
        DatasetFolder.create(
            path, Description(task=TASK, format="parquet", layout=ColumnLayout.for_env(info))
        )
        recording = recording_in(path)
    return ServingJob(spec=spec, shared=shared, version=12, greedy=greedy, seed=3, recording=recording)


def program(of, *, index=0, num_gmis=1):
    gmi_slice = Slice(node="here", backend="cpu", cores=(0,), num_threads=1)
    identity = GmiIdentity(
        index=index, num_gmis=num_gmis, slice=gmi_slice, roles=("simulator", "agent"), task=TASK
    )
    context = GmiContext(identity=identity, communicator=SoloCommunicator(), device=torch.device("cpu"))
    return DpOnlyServing(of, context)


def test_the_dataset_replays_in_environments_of_the_same_seed(tmp_path):
    serving = program(job(tmp_path / "d", greedy=True))
    parts = [serving.gmi_run("serve", 70), serving.gmi_run("serve", 10)]
    serving.gmi_run("finish", 60.0)
    serving.close()
    result = merged_results([*parts])
    assert result.env_steps == 4 * 80
    assert result.step.count == result.act.count == result.simulate.count == 80
    assert result.write_wait_s >= 0
    episodes = {(each.env, each.number): each for each in open_dataset(tmp_path / "d").episodes()}
    assert sum(len(each.rewards) for each in episodes.values()) == 4 * 80
    assert sorted(result.episode_returns) == pytest.approx(
        sorted(float(each.rewards.sum()) for each in episodes.values() if each.is_whole)
    )
    env = make_env_factory(TASK)(num_envs=4, first_env_index=0, seed=3, num_threads=1)
    obs = env.reset()
    rows = {env_index: [] for env_index in range(4)}
    for (env_index, _), each in sorted(episodes.items()):
        rows[env_index] += [(each, t) for t in range(len(each.rewards))]
    for t in range(80):
        actions = torch.tensor([rows[i][t][0].actions[rows[i][t][1]].tolist() for i in range(4)])
        assert obs.tolist() == [rows[i][t][0].obs[rows[i][t][1]].tolist() for i in range(4)], t
        step = env.step(actions)
        assert step.rewards.tolist() == [rows[i][t][0].rewards[rows[i][t][1]] for i in range(4)], t
        obs = step.obs
    env.close()


def test_exploration_is_an_environments_own_whichever_gmi_hosts_it():
    """One GMI of four environments, and two of two, act alike while exploring."""
    whole = program(job(greedy=False, num_envs=4))
    halves = [program(job(greedy=False, num_envs=2), index=index, num_gmis=2) for index in range(2)]
    for each in (whole, *halves):
        each.serve(40)
    assert torch.equal(whole.simulator.obs, torch.cat([each.simulator.obs for each in halves]))
    greedy = program(job(greedy=True, num_envs=4))
    greedy.serve(40)
    assert not torch.equal(greedy.simulator.obs, whole.simulator.obs)
    for each in (whole, greedy, *halves):
        each.close()


def test_a_recurrent_policy_begins_each_served_episode_without_memory_of_the_last():
    serving = program(job(greedy=True, core="gru"))
    serving.serve(80)
    ends = 0
    policy = load_policy(
        job(greedy=True, core="gru").shared, job(greedy=True, core="gru").spec, env_info(TASK)
    )
    agent = Agent(policy)
    env = make_env_factory(TASK)(num_envs=4, first_env_index=0, seed=3, num_threads=1)
    obs = env.reset()
    for _ in range(80):
        step = env.step(agent.act_greedily(obs))
        agent.reset(step.final_ids)
        ends, obs = ends + len(step.final_ids), step.obs
    assert ends > 4
    assert torch.equal(serving.simulator.obs, obs)
    env.close()
    serving.close()


def test_greedy_serving_of_bits_takes_the_likelier_value_of_each():
    bits = ActionSpec(kind="multi_discrete", dim=3, choices=(2, 2, 2))
    info = replace(env_info(TASK), action=bits)
    network = NetworkSpec(hidden=(8,), head="bernoulli")
    policy = new_policy(replace(job(greedy=True).spec, network=network), info, torch.device("cpu"))
    agent = ServingAgent(job(greedy=True), policy, num_envs=64, first_env_index=0)
    obs = torch.randn(64, info.obs_dim, generator=torch.Generator().manual_seed(0))
    chosen = agent.act(obs)
    assert torch.equal(chosen, Agent(policy).act_greedily(obs))
    assert 0 < chosen.sum() < chosen.numel()
