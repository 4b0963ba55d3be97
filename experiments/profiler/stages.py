"""Training loops of libraries with their own defaults, annotated as in RL-Scope: inference, simulation, backpropagation.

    PEERS/base/bin/python -m experiments.profiler.stages sb3 td3 Walker2d-v5 --iterations 12

PEERS: the folder of experiments/peers/setup.sh; ``rllib`` runs in rayagi's own environment, ``sample-factory`` in PEERS/sf.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch

from rayagi import profiler

SEED = 1
STEPS = {"ppo": 2048, "a2c": 500, "ddpg": 100, "td3": 100, "sac": 100, "appo": 4096}
"""Environment steps of an iteration: PPO's and APPO's are those of an update, the others update within it (A2C every 5, the
off-policy ones after each)."""
SKRL_ENVS = {"ppo": 4, "sac": 1}
SKRL_STEPS = {"ppo": 4 * 1024, "sac": 100}
"""Environments of skrl's examples, and environment steps of an iteration as above."""
SIMULATE, INFER, LEARN = "simulation", "inference", "backpropagation"


def sb3(algorithm: str, task: str, iterations: int) -> None:
    """Stable-Baselines3 with its defaults: one environment."""
    import stable_baselines3

    made = getattr(stable_baselines3, algorithm.upper())
    model = made("MlpPolicy", gymnasium.make(task), seed=SEED, device="cpu")
    off_policy = hasattr(model, "learning_starts")
    if off_policy:
        model.learn(total_timesteps=model.learning_starts)
    else:
        model.policy.forward = profiler.operation(INFER)(model.policy.forward)
    # The wrappers of the vectorised environment are Python of the library: they count as simulation, as in the paper.
    model.env.step = profiler.operation(SIMULATE)(model.env.step)
    model.policy.predict = profiler.operation(INFER)(model.policy.predict)
    model.train = profiler.operation(LEARN)(model.train)
    for _ in range(iterations):
        with profiler.iteration():
            model.learn(total_timesteps=STEPS[algorithm], reset_num_timesteps=False)


def cleanrl(algorithm: str, task: str, iterations: int) -> None:
    """The loop of CleanRL's sac_continuous_action.py."""
    from experiments.learning.cleanrl import START, Sac

    if algorithm != "sac":
        raise SystemExit("cleanrl: only sac")
    env = gymnasium.make(task)
    env.action_space.seed(SEED)
    loop = Sac(env, SEED)
    obs, _ = env.reset(seed=SEED)
    explore = profiler.operation(INFER)(loop.explore)
    simulate = profiler.operation(SIMULATE)(env.step)
    update = profiler.operation(LEARN)(loop.update)

    def step(steps: int) -> None:
        nonlocal obs
        action = explore(obs, steps)
        next_obs, reward, terminated, truncated, _ = simulate(action)
        loop.rows[steps] = np.concatenate((obs, action, [reward, terminated], next_obs))
        obs = env.reset()[0] if terminated or truncated else next_obs

    for steps in range(START):
        step(steps)
    for first in range(START, START + iterations * STEPS[algorithm], STEPS[algorithm]):
        with profiler.iteration():
            for steps in range(first, first + STEPS[algorithm]):
                step(steps)
                update(steps, steps)


def rllib(algorithm: str, task: str, iterations: int) -> None:
    """RLlib with its defaults, runner and learner in this process."""
    import ray
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.algorithms.sac import SACConfig

    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    config: Any = {"ppo": PPOConfig, "sac": SACConfig}[algorithm]()
    config = config.environment(task).env_runners(num_env_runners=0).learners(num_learners=0)
    algo = config.debugging(seed=SEED).build_algo()
    if algorithm == "sac":
        # Until it learns: RLlib's SAC first fills its buffer.
        while (
            algo.train()["num_env_steps_sampled_lifetime"] <= config.num_steps_sampled_before_learning_starts
        ):
            pass
    runner, learner = algo.env_runner, algo.learner_group._learner
    # All of the runner but the environment: connectors, episodes and the module.
    runner.sample = profiler.operation(INFER)(runner.sample)
    runner.env.step = profiler.operation(SIMULATE)(runner.env.step)
    learner.update = profiler.operation(LEARN)(learner.update)
    for _ in range(iterations):
        with profiler.iteration():
            algo.train()
    ray.shutdown()


def skrl(algorithm: str, task: str, iterations: int) -> None:
    """skrl's examples for Gymnasium's Pendulum, but for an action's range: four environments for PPO, one for SAC."""
    from skrl.envs.wrappers.torch import wrap_env
    from skrl.trainers.torch import SequentialTrainer
    from skrl.utils import set_seed

    set_seed(SEED)
    num_envs = SKRL_ENVS[algorithm]
    env = wrap_env(
        gymnasium.make(task)
        if num_envs == 1
        else gymnasium.make_vec(task, num_envs=num_envs, vectorization_mode="sync")
    )
    with tempfile.TemporaryDirectory() as logs:
        agent = {"ppo": _skrl_ppo, "sac": _skrl_sac}[algorithm](env, logs)
        trainer = SequentialTrainer(cfg={"timesteps": 1000, "headless": True}, env=env, agents=agent)
        if algorithm == "sac":  # until it learns: it counts from 0 each time that the trainer starts
            trainer.train()
            agent.cfg.learning_starts = 0
        env.step = profiler.operation(SIMULATE)(env.step)
        agent.act = profiler.operation(INFER)(agent.act)
        agent.update = profiler.operation(LEARN)(agent.update)
        trainer.cfg.timesteps = SKRL_STEPS[algorithm] // num_envs
        for _ in range(iterations):
            with profiler.iteration():
                trainer.train()


def _skrl_init(models: dict[str, Any]) -> None:
    """Sizes of layers, by one observation and action: skrl's own are of the space's type, doubles here."""
    for role, model in models.items():
        rows = {"observations": model.num_observations, "taken_actions": model.num_actions}
        model.init_state_dict({name: torch.zeros(1, size) for name, size in rows.items()}, role=role)


def _skrl_ppo(env: Any, logs: str) -> Any:
    from skrl.agents.torch import ExperimentCfg
    from skrl.agents.torch.ppo import PPO, PPO_CFG
    from skrl.memories.torch import RandomMemory
    from skrl.resources.preprocessors.torch import RunningStandardScaler
    from skrl.resources.schedulers.torch import KLAdaptiveLR
    from skrl.utils.model_instantiators.torch import deterministic_model, gaussian_model

    spaces = {
        "observation_space": env.observation_space,
        "action_space": env.action_space,
        "device": env.device,
    }
    hidden = [{"name": "net", "input": "OBSERVATIONS", "layers": [64, 64], "activations": "relu"}]
    models = {
        "policy": gaussian_model(**spaces, clip_actions=True, network=hidden, output="tanh(ACTIONS)"),
        "value": deterministic_model(**spaces, network=hidden, output="ONE"),
    }
    _skrl_init(models)
    cfg = PPO_CFG(
        rollouts=1024,
        learning_epochs=10,
        mini_batches=32,
        discount_factor=0.9,
        learning_rate_scheduler=KLAdaptiveLR,
        learning_rate_scheduler_kwargs={"kl_threshold": 0.008},
        value_loss_scale=0.5,
        observation_preprocessor=RunningStandardScaler,
        observation_preprocessor_kwargs={"size": env.observation_space, "device": env.device},
        value_preprocessor=RunningStandardScaler,
        value_preprocessor_kwargs={"size": 1, "device": env.device},
        experiment=ExperimentCfg(directory=logs, write_interval=500, checkpoint_interval=5000),
    )
    memory = RandomMemory(memory_size=cfg.rollouts, num_envs=env.num_envs, device=env.device)
    return PPO(models=models, memory=memory, cfg=cfg, **spaces)


def _skrl_sac(env: Any, logs: str) -> Any:
    from skrl.agents.torch import ExperimentCfg
    from skrl.agents.torch.sac import SAC, SAC_CFG
    from skrl.memories.torch import RandomMemory
    from skrl.utils.model_instantiators.torch import deterministic_model, gaussian_model

    spaces = {
        "observation_space": env.observation_space,
        "action_space": env.action_space,
        "device": env.device,
    }
    layers = {"name": "net", "layers": [400, 300], "activations": "relu"}
    actor = [layers | {"input": "OBSERVATIONS"}]
    critic = [layers | {"input": "concatenate([OBSERVATIONS, ACTIONS])"}]
    models = {"policy": gaussian_model(**spaces, clip_actions=True, network=actor, output="tanh(ACTIONS)")}
    for role in ("critic_1", "critic_2", "target_critic_1", "target_critic_2"):
        models[role] = deterministic_model(**spaces, network=critic, output="ONE")
    _skrl_init(models)
    for model in models.values():
        model.init_parameters(method_name="normal_", mean=0.0, std=0.1)
    cfg = SAC_CFG(
        discount_factor=0.98,
        batch_size=100,
        learning_starts=1000,
        experiment=ExperimentCfg(directory=logs, write_interval=75, checkpoint_interval=750),
    )
    memory = RandomMemory(memory_size=20_000, num_envs=env.num_envs, device=env.device, replacement=False)
    return SAC(models=models, memory=memory, cfg=cfg, **spaces)


def sample_factory(algorithm: str, task: str, iterations: int) -> None:
    """Sample Factory's APPO with the settings of its examples for MuJoCo, in serial mode: all in this process."""
    from experiments.profiler.sample_factory_stages import train

    if algorithm != "appo":
        raise SystemExit("sample-factory: only appo")
    train(task, iterations)


LIBRARIES: dict[str, Callable[[str, str, int], None]] = {
    "sb3": sb3,
    "cleanrl": cleanrl,
    "rllib": rllib,
    "skrl": skrl,
    "sample-factory": sample_factory,
}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("library", choices=tuple(LIBRARIES))
    parser.add_argument("algorithm", choices=tuple(STEPS))
    parser.add_argument("task")
    parser.add_argument("--iterations", type=int, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    LIBRARIES[given.library](given.algorithm, given.task, given.iterations)


if __name__ == "__main__":
    main()
