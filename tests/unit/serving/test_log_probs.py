"""The log probabilities in a dataset are those that torch's distributions compute from the saved policy and the rows."""

import numpy as np
import pytest
import torch
from torch.distributions import (
    AffineTransform,
    Bernoulli,
    Categorical,
    Normal,
    TanhTransform,
    TransformedDistribution,
)

from actors.gmi import GmiContext
from rayagi.config.spec import EnvSpec, GmiSpec, NetworkSpec, RunSpec
from rayagi.envs import env_info
from rayagi.models.policy import load_policy, new_policy
from rayagi.serving.column_layout import ColumnLayout
from rayagi.serving.dataset import open_dataset
from rayagi.serving.manifest import DatasetFolder, Description
from rayagi.serving.program import ServingJob
from rayagi.serving.templates import DpOnlyServing
from tests.unit.serving.test_dp_only import recording_in

PENDULUM, ECHO = "InvertedPendulum-v5", "tests.fakes.echo:Echo-v0"
STEPS, ENVS = 90, 4


def gaussian(policy, outputs, actions):
    return Normal(outputs, policy.model.head.log_std.exp()).log_prob(actions).sum(-1)


def state_gaussian(policy, outputs, actions):
    mean, log_std = outputs.chunk(2, -1)
    return Normal(mean, log_std.exp()).log_prob(actions).sum(-1)


def squashed(policy, outputs, actions):
    normal = Normal(outputs.double(), policy.model.head.log_std.exp().double())
    maps = [TanhTransform(), AffineTransform(0.0, 3.0)]  # InvertedPendulum's range is [-3, 3]
    return TransformedDistribution(normal, maps).log_prob(actions.double()).sum(-1)


def categorical(policy, outputs, actions):
    return Categorical(logits=outputs).log_prob(actions)


def multi_categorical(policy, outputs, actions):
    parts = outputs.split(policy.action.choices, -1)
    return sum(Categorical(logits=part).log_prob(actions[:, i]) for i, part in enumerate(parts))


def bernoulli(policy, outputs, actions):
    return Bernoulli(logits=outputs).log_prob(actions.float()).sum(-1)


CASES = {
    "gaussian": (PENDULUM, {}, NetworkSpec(hidden=(8,), initial_log_std=0.4), gaussian),
    "gaussian of an RLModule": (
        PENDULUM,
        {},
        NetworkSpec(module="tests.fakes.rl_modules:Trunk"),
        state_gaussian,
    ),
    "squashed": (PENDULUM, {}, NetworkSpec(hidden=(8,), head="squashed_gaussian"), squashed),
    "categorical": ("CartPole-v1", {}, NetworkSpec(hidden=(8,)), categorical),
    "multi-categorical": (ECHO, {"action": "multi_discrete"}, NetworkSpec(hidden=(8,)), multi_categorical),
    "bernoulli": (ECHO, {"action": "multi_binary"}, NetworkSpec(hidden=(8,), head="bernoulli"), bernoulli),
    "recurrent": (PENDULUM, {}, NetworkSpec(hidden=(8,), core="gru", core_size=6), gaussian),
}


def served(path, task, kwargs, network, *, greedy):
    """The dataset of a policy with large weights, and the policy as it was saved."""
    info = env_info(task, kwargs=kwargs)
    spec = RunSpec(
        env=EnvSpec(id=task, kwargs=kwargs), gmi=GmiSpec(num_envs=ENVS, backend="cpu"), network=network
    )
    policy = new_policy(spec, info, torch.device("cpu"))
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(2.0)
        obs = torch.randn(64, info.obs_dim, generator=torch.Generator().manual_seed(0))
        policy.normaliser.update(policy.normaliser.moments_of(obs))
    shared = {
        "learner": {"model": policy.model.state_dict()},
        "obs_normaliser": policy.normaliser.state_dict(),
    }
    DatasetFolder.create(path, Description(task=task, format="parquet", layout=ColumnLayout.for_env(info)))
    recording = recording_in(path)
    job = ServingJob(spec=spec, shared=shared, version=12, greedy=greedy, seed=3, recording=recording)
    program = DpOnlyServing(job, GmiContext.local(task, roles=("simulator", "agent")))
    program.serve(STEPS)
    program.finish(60.0)
    program.close()
    return open_dataset(path), load_policy(shared, spec, info)


@pytest.mark.parametrize(
    ("name", "greedy"),
    [
        pytest.param(
            name,
            greedy,
            marks=() if (name, greedy) in (("gaussian", False), ("recurrent", False)) else pytest.mark.slow,
        )
        for name, greedy in [*((name, False) for name in CASES), ("gaussian", True), ("bernoulli", True)]
    ],
)
def test_log_probabilities_are_those_of_the_saved_policy(tmp_path, name, greedy):
    task, kwargs, network, log_prob = CASES[name]
    dataset, policy = served(tmp_path / "d", task, kwargs, network, greedy=greedy)
    rows, clipped, values = 0, 0, []
    with torch.inference_mode():
        for episode in dataset.episodes():
            observed = policy.observe(torch.from_numpy(episode.obs[:-1].copy()))
            actions = torch.from_numpy(episode.actions.copy())
            if policy.state_dim:
                states, outputs = torch.zeros(1, policy.state_dim), []
                for row in observed:
                    out, states = policy.step(row[None], states)
                    outputs.append(out[0])
                outputs = torch.stack(outputs)
            else:
                outputs = policy.outputs(observed)
            expected = log_prob(policy, outputs, actions).numpy()
            assert episode.log_probs == pytest.approx(expected, abs=2e-4, rel=2e-5)
            assert episode.policy_versions.tolist() == [12] * len(actions)
            rows, clipped = rows + len(actions), clipped + int((episode.actions == 3.0).sum())
            values.append(episode.log_probs)
    assert rows == STEPS * ENVS
    assert len(np.unique(np.concatenate(values).round(3))) > (10 if not greedy else 0)
    if name == "gaussian" and not greedy:
        assert clipped > 5  # there the density at the limit is recorded
