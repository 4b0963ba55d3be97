"""Compiles MuJoCo Warp's kernels for a GPU of another machine, on one that needs no GPU.

    python -m experiments.gpu_rollouts.precompile CACHE --tasks rayagi/Ant-v0 rayagi/Humanoid-v0 --arch 90

A first iteration on a GPU compiles about sixty modules, some of which take ten seconds. Copy CACHE to the GPU's machine
and set WARP_CACHE_PATH to it there. What the CPU's simulation does not use, such as kernels for convex collisions, or for
elliptic cones, is still compiled there. Versions of Warp and MuJoCo Warp have to be the same; that of Python need not be.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.scripts import command_line
from rayagi.envs import make_env_factory
from rayagi.envs.tasks.provider import TASKS

DEFAULT_BLOCK = 256
"""Threads of a block where a launch does not say."""


def used_modules(tasks: list[str]) -> dict[tuple[str, int], Any]:
    """Modules of Warp that a step of the tasks uses, by name and threads of a block, by making it on the CPU."""
    import torch
    import warp
    from mujoco_warp._src.types import BlockDim
    from warp._src.context import user_modules

    blocks: dict[str, set[int]] = defaultdict(set)
    model_blocks = set(asdict(BlockDim()).values())
    with warp.ScopedDevice("cpu"), recorded_blocks(warp, blocks):
        for task in tasks:
            env = make_env_factory(task, engine="mujoco_warp")(
                num_envs=4, first_env_index=0, seed=0, num_threads=1
            )
            env.reset()
            env.step(torch.zeros(4, env.info.action.dim))
            env.close()
    return {
        (module.name, size): module
        for module in user_modules.values()
        if module.execs
        for size in sorted(gpu_blocks(blocks.get(module.name, {DEFAULT_BLOCK}), model_blocks))
    }


def gpu_blocks(cpu_blocks: set[int], model_blocks: set[int]) -> set[int]:
    """Sizes of blocks that launches on a GPU may ask for: ``cpu_blocks`` where the CPU's launches do.

    A size of 1 is MuJoCo Warp's on a CPU alone. On a GPU it is one of the model's, and nothing says which.
    """
    return cpu_blocks if 1 not in cpu_blocks else (cpu_blocks - {1}) | model_blocks


@contextmanager
def recorded_blocks(warp: Any, blocks: dict[str, set[int]]) -> Iterator[None]:
    """Note the threads of a block that launches ask for, which a CPU ignores and a GPU's compiled modules depend on."""
    launch, launch_tiled = warp.launch, warp.launch_tiled

    def noting(original: Callable[..., Any]) -> Callable[..., Any]:
        def noted(kernel: Any, *given: Any, **named: Any) -> Any:
            blocks[kernel.module.name].add(named.get("block_dim") or DEFAULT_BLOCK)
            return original(kernel, *given, **named)

        return noted

    warp.launch, warp.launch_tiled = noting(launch), noting(launch_tiled)
    try:
        yield
    finally:
        warp.launch, warp.launch_tiled = launch, launch_tiled


def compiled(module: Any, block_size: int, arch: int) -> str:
    """Compile one of them, unless it is in the cache; its name."""
    import warp

    module.get_module_hash(block_size)
    options = module.resolve_options(warp.config, block_dim=block_size)
    module._compile(None, output_arch=arch, options=options)  # compile_aot_module has no size of blocks
    return f"{module.name}, blocks of {block_size}"


def main() -> int:
    """Command line; returns the exit code."""
    parser = command_line(__doc__)
    parser.add_argument("cache", type=Path, help="folder, for WARP_CACHE_PATH")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--arch", type=int, default=90, help="compute capability: 80, 90, 100 (default 90)")
    arguments = parser.parse_args()
    os.environ["WARP_CACHE_PATH"] = str(arguments.cache.absolute())
    try:
        modules = used_modules(arguments.tasks)
    except ImportError as error:
        print(f"Nothing was compiled: {error}. pip install 'rayagi[gpu]'", file=sys.stderr)
        return 1
    work = [(module, size) for (_, size), module in modules.items()]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        names = pool.map(lambda each: compiled(*each, arguments.arch), work)
        for number, name in enumerate(names, 1):
            print(f"{number} of {len(work)}: {name}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
