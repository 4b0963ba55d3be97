"""RLlib config classes (PPOConfig, ...), built from the algorithm definitions. Only the driver imports this."""

from __future__ import annotations

import importlib

from rayagi.algorithms.definition import AlgorithmDefinition
from rayagi.algorithms.registry import DEFINITIONS
from rayagi.config.rllib_config import GmiConfig

_DOC = """{name}, {summary}, on GMIs, with RLlib's setting names.

Unset settings come from the task's preset. An RLlib setting that rayagi does not support raises ConfigError when the
algorithm is built; the message names the alternative::

    config = {config}().environment("Ant-v5").gmi(num_gmis=2, num_envs=32).training(lr=3e-4)
    algo = config.build_algo()
    result = algo.train()

``training()`` supports ``{settings}``.

A run without a seed has seed 0, as with ``rayagi train``. So Tune's ``num_samples`` repeats the same run unless the seed
differs, as with ``debugging(seed=tune.randint(0, 2**31))``.
"""


def _config_class(definition: AlgorithmDefinition) -> type[GmiConfig]:
    """A subclass of GmiConfig and of RLlib's own config of the algorithm."""
    face = definition.rllib
    module, _, name = face.base.partition(":")
    base = getattr(importlib.import_module(module), name)
    honoured = ", ".join(definition.training_names)
    doc = _DOC.format(name=face.algorithm, summary=definition.summary, config=face.config, settings=honoured)
    bases = (GmiConfig,) if issubclass(GmiConfig, base) else (GmiConfig, base)
    return type(face.config, bases, {"algorithm": definition.name, "__doc__": doc, "__module__": __name__})


CONFIGS: dict[str, type[GmiConfig]] = {name: _config_class(each) for name, each in DEFINITIONS.items()}
"""Config class by algorithm name."""
globals().update({each.__name__: each for each in CONFIGS.values()})  # pickle looks for them here
