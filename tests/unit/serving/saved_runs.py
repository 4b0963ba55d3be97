"""Creates run folders with untrained policies, without training."""

from pathlib import Path

import torch

from rayagi.algorithms.normalisers import ObservationNormaliser
from rayagi.config.convert import run_spec_to_dict
from rayagi.config.spec import EnvSpec, GmiSpec, NetworkSpec, RunSpec
from rayagi.envs import env_info
from rayagi.models.networks import ActorCritic
from rayagi.run.folder import create_run


def saved_run(
    out: Path, task="InvertedPendulum-v5", *, name="a", iterations=(4,), core="none", head="auto"
) -> Path:
    """A run folder with a checkpoint of other weights for each iteration; the last one is the best too."""
    spec = RunSpec(
        env=EnvSpec(id=task),
        gmi=GmiSpec(num_envs=2, backend="cpu"),
        network=NetworkSpec(hidden=(8,), core=core, core_size=6, head=head),
    )
    folder = create_run(out, task, seed=0, rayagi_version="0.1", name=name)
    folder.write_config(run_spec_to_dict(spec))
    for iteration in iterations:
        save(folder, spec, iteration)
    folder.unlock()
    return folder.path


def save(folder, spec, iteration):
    """A checkpoint."""
    info = env_info(spec.env.id)
    normaliser = ObservationNormaliser(info.obs_dim, 10.0, torch.device("cpu"))
    model = ActorCritic(info, spec.network, seed=iteration)
    with torch.no_grad():
        for parameter in model.policy.parameters():
            parameter.mul_(10.0)  # the last layer starts near zero: make actions differ visibly
    shared = {"learner": {"model": model.state_dict()}, "obs_normaliser": normaliser.state_dict()}
    folder.checkpoints.save(
        {"shared": shared, "local": [], "num_gmis": 1},
        {"iteration": iteration, "env_steps": 1000 * iteration},
        best={"metric": "test", "value": iteration},
    )
