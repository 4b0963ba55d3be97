"""How to load each kernel: its only program, or an example of its generated programs."""

from collections.abc import Callable, Mapping

import torch

from actors.replay import kernel as replay
from collectives import shared_words
from collectives.transports.shm import kernel
from rayagi.envs import make_env_factory
from rayagi.envs.fused.c import backend
from rayagi.envs.fused.simulators import CartPole
from rayagi.native import acting, learning, worlds
from rayagi.profiler import sweep


def make_envs(env_id: str) -> None:
    make_env_factory(env_id)(num_envs=2, first_env_index=0, seed=0, num_threads=1).close()


LOADED: Mapping[str, Callable[[], object]] = {
    "shared words": shared_words.atomic_words,
    "operations in shared memory": kernel._load,
    "replay stores": replay._load,
    "acting": acting._load,
    "learning": learning._load,
    "MuJoCo's worlds": worlds._load,
    "tasks' formulas": lambda: make_envs("Ant-v5"),
    "tasks' rules": lambda: make_envs("rayagi/BallBalance-v0"),
    "overlap of intervals": sweep._compiled,
    "fused simulators": lambda: backend.compiled(CartPole(), torch.float32),
}
"""By kernel name: a function that loads the kernel, and maybe others before it."""
