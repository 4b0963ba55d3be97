"""rayagi: reinforcement learning for robots on shared or sliced GPUs, on Ray.

Names are imported when they are first used: ``import rayagi`` loads neither Ray nor torch.
"""

from __future__ import annotations

import importlib
from functools import cache
from importlib.machinery import PathFinder
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rayagi.algorithm import GmiAlgorithm
    from rayagi.config.rllib_config import GmiConfig
    from rayagi.config.spec import RunSpec as RunSpec
    from rayagi.coordinator.session import Session as Session

    A3C: type[GmiAlgorithm]
    APPO: type[GmiAlgorithm]
    BC: type[GmiAlgorithm]
    DQN: type[GmiAlgorithm]
    FastSAC: type[GmiAlgorithm]
    FastTD3: type[GmiAlgorithm]
    IMPALA: type[GmiAlgorithm]
    IQL: type[GmiAlgorithm]
    PPO: type[GmiAlgorithm]
    SAC: type[GmiAlgorithm]
    TD3: type[GmiAlgorithm]
    TD3BC: type[GmiAlgorithm]
    TRPO: type[GmiAlgorithm]
    A3CConfig: type[GmiConfig]
    AppoConfig: type[GmiConfig]
    BCConfig: type[GmiConfig]
    DQNConfig: type[GmiConfig]
    FastSACConfig: type[GmiConfig]
    FastTD3Config: type[GmiConfig]
    IQLConfig: type[GmiConfig]
    ImpalaConfig: type[GmiConfig]
    PPOConfig: type[GmiConfig]
    SACConfig: type[GmiConfig]
    TD3BCConfig: type[GmiConfig]
    TD3Config: type[GmiConfig]
    TRPOConfig: type[GmiConfig]

__version__ = "0.1.0"


class HiddenPackageError(ImportError):
    """A package of somebody else's has the name of one that rayagi needs, and comes first."""


def _folder_above(package: str) -> Path:
    """The folder that has a package, of the path of its __init__.py."""
    return Path(package).resolve().parent.parent


def refuse_hidden_packages() -> None:
    """Check that Python's path leads to rayagi's other packages, here and in Ray's processes, which have the working folder
    too.

    Raises:
        HiddenPackageError: another package of such a name comes first.
    """
    for name, path in product(("actors", "collectives", "placement"), (None, [""])):
        found = PathFinder.find_spec(name, path)
        # Without an origin it is a folder without __init__.py, which hides nothing.
        if found and found.origin and _folder_above(found.origin) != _folder_above(__file__):
            raise HiddenPackageError(
                f"{found.origin} hides rayagi's package {name!r} from Python: rename that package, or start elsewhere, "
                "without it on Python's path"
            )


@cache
def _homes() -> dict[str, str]:
    """The module of each name. Even the list of algorithms imports numpy, which `rayagi.profiler` must not."""
    definitions = importlib.import_module("rayagi.algorithms.registry").DEFINITIONS
    return {
        "RunSpec": "rayagi.config.spec",
        "Session": "rayagi.coordinator.session",
        **{each.rllib.algorithm: "rayagi.algorithm" for each in definitions.values()},
        **{each.rllib.config: "rayagi.config.rllib_classes" for each in definitions.values()},
    }


def __getattr__(name: str) -> Any:
    # `from rayagi import profiler` asks here before it imports the submodule; all names of _homes() are classes.
    if not name[:1].isupper() and name != "__all__":
        raise AttributeError(f"module 'rayagi' has no attribute {name!r}")
    refuse_hidden_packages()
    names = tuple(sorted({*_homes(), "__version__"}))
    if name == "__all__":
        return names
    if name not in names:
        raise AttributeError(f"module 'rayagi' has no attribute {name!r}; it has {', '.join(names)}")
    return getattr(importlib.import_module(_homes()[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_homes()})
